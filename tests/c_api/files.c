/* The C interface from C11: checkpoints, and files of packed weights. */
#include <nibble/nibble.h>
#include <stdio.h>
#include <string.h>

#include "c_api_test.h"

static void watch(void* user, uint64_t done, uint64_t total, const char* what) {
  CHECK(done <= total && what != NULL);
  ++*(int*)user;
}

/* A golden checkpoint against the values an independent program computed. */
void test_checkpoint(const char* golden, const char* scratch) {
  char path[1024], out[1024];
  snprintf(path, sizeof path, "%s/awq/g128.expected.safetensors", golden);
  nib_checkpoint *checkpoint = NULL, *answers = NULL;
  OK(nib_checkpoint_open(path, &answers));
  snprintf(path, sizeof path, "%s/awq/g128", golden);
  OK(nib_checkpoint_open(path, &checkpoint));
  nib_checkpoint_info info = SIZED(nib_checkpoint_info);
  OK(nib_checkpoint_get(checkpoint, &info));
  CHECK(info.modules == 1 && info.tensors == 4 && strstr(info.config, "\"awq\"") != NULL);

  size_t index = 9;
  OK(nib_checkpoint_find_module(checkpoint, "model.proj", &index));
  CHECK(index == 0);
  nib_module module = SIZED(nib_module);
  OK(nib_checkpoint_module(checkpoint, index, &module));
  CHECK(strcmp(module.name, "model.proj") == 0 && strcmp(module.format, "awq") == 0 && strcmp(module.scheme, "u4zg128") == 0);
  CHECK(strcmp(module.claimed, "u4zg128") == 0 && module.n == 8 && module.k == 256 && module.quantized && module.has_bias);
  char* notes = NULL;
  OK(nib_checkpoint_notes(checkpoint, &notes));
  nib_text_free(notes);

  nib_stored_tensor answer = SIZED(nib_stored_tensor);
  OK(nib_checkpoint_find_tensor(answers, "model.proj.f32", &index));
  OK(nib_checkpoint_tensor(answers, index, &answer));
  CHECK(answer.bytes == 8 * 256 * 4 && answer.view.dtype == NIB_F32 && answer.view.shape[1] == 256);

  /* From the file, and from the same tensors in memory. */
  for (int from_memory = 0; from_memory < 2; ++from_memory) {
    nib_qtensor* q = NULL;
    if (from_memory) {
      nib_named_view tensors[4];
      for (size_t i = 0; i < 4; ++i) {
        nib_stored_tensor stored = SIZED(nib_stored_tensor);
        OK(nib_checkpoint_tensor(checkpoint, i, &stored));
        tensors[i].name = stored.name + strlen("model.proj.");
        tensors[i].view = stored.view;
      }
      OK(nib_read_module(tensors, 4, info.config, &q, &notes));
      nib_text_free(notes);
      OK(nib_qtensor_destroy(q));
      OK(nib_read_module(tensors, 4, NULL, &q, NULL)); /* AWQ's shapes suffice */
      nib_qtensor* none = NULL;
      FAILS(NIB_NOT_FOUND, "\"qweight\"", nib_read_module(tensors, 1, NULL, &none, NULL));
      FAILS(NIB_NOT_FOUND, "none", nib_read_module(NULL, 0, NULL, &none, NULL));
      FAILS(NIB_INVALID_ARGUMENT, "NULL", nib_read_module(NULL, 2, NULL, &none, NULL));
      FAILS(NIB_CORRUPT_DATA, "JSON", nib_read_module(tensors, 4, "{", &none, NULL));
      tensors[1].view.strides[0] += 5;
      FAILS(NIB_INVALID_ARGUMENT, "not dense", nib_read_module(tensors, 4, NULL, &none, NULL));
    } else {
      OK(nib_checkpoint_read(checkpoint, 0, &q, &notes));
      nib_text_free(notes);
    }
    nib_weight* weight = pack(q, NULL);
    float w[8 * 256];
    dequantize(weight, w, 8, 256);
    CHECK(memcmp(w, answer.view.data, sizeof w) == 0);
    OK(nib_weight_destroy(weight));
    OK(nib_qtensor_destroy(q));
  }

  /* AWQ → compressed-tensors → dense → s8: files that other programs can open. */
  int calls = 0;
  nib_transform_desc transform = SIZED(nib_transform_desc);
  transform.overwrite = 1;
  transform.progress = watch;
  transform.user = &calls;
  char* report = NULL;
  snprintf(out, sizeof out, "%s/converted", scratch);
  OK(nib_checkpoint_convert(path, out, &transform, &report));
  CHECK(strstr(report, "model.proj\tu4zg128") != NULL && calls > 0);
  nib_text_free(report);
  FAILS(NIB_ALREADY_EXISTS, "converted", nib_checkpoint_convert(path, out, NULL, NULL));
  snprintf(path, sizeof path, "%s/dense", scratch);
  transform.dtype = NIB_F32;
  OK(nib_checkpoint_dequantize(out, path, &transform, NULL));
  snprintf(out, sizeof out, "%s/s8", scratch);
  nib_quantize_desc s8 = SIZED(nib_quantize_desc);
  s8.scheme = "s8c";
  transform.quantize = &s8;
  transform.format = "int-quantized";
  transform.act_scheme = "s8r";
  transform.dry_run = 1;
  transform.only = "proj";
  OK(nib_checkpoint_quantize(path, out, &transform, &report));
  CHECK(strstr(report, "model.proj\ts8r_s8c") != NULL);
  nib_text_free(report);
  nib_checkpoint* nothing = NULL;
  FAILS(NIB_NOT_FOUND, "s8 does not exist", nib_checkpoint_open(out, &nothing));
  transform.dry_run = 0;
  FAILS(NIB_INVALID_ARGUMENT, "the only expression",
        (transform.only = "head", nib_checkpoint_quantize(path, out, &transform, NULL)));
  transform.only = NULL;
  OK(nib_checkpoint_quantize(path, out, &transform, &report));
  CHECK(strstr(report, "model.proj\t") != NULL);
  nib_text_free(report);
  nib_checkpoint* s8_checkpoint = NULL;
  OK(nib_checkpoint_open(out, &s8_checkpoint));
  OK(nib_checkpoint_module(s8_checkpoint, 0, &module));
  CHECK(strcmp(module.scheme, "s8c") == 0 && strcmp(module.claimed, "s8r_s8c") == 0);
  OK(nib_checkpoint_destroy(s8_checkpoint));
  FAILS(NIB_INVALID_ARGUMENT, "calibration",
        (transform.act_scheme = "s8t", nib_checkpoint_quantize(path, out, &transform, NULL)));
  transform.act_scheme = NULL;

  /* Convolutions only on request. */
  static const char kHeader[] = "{\"net.conv.weight\":{\"dtype\":\"F32\",\"shape\":[12,8,3,3],\"data_offsets\":[0,3456]}}";
  float kernel[12 * 8 * 3 * 3];
  fill(kernel, sizeof kernel / sizeof *kernel, 13);
  const uint64_t header_bytes = sizeof kHeader - 1;
  snprintf(path, sizeof path, "%s/conv.safetensors", scratch);
  FILE* file = fopen(path, "wb");
  CHECK(file != NULL);
  if (file == NULL) return;
  CHECK(fwrite(&header_bytes, 8, 1, file) == 1 && fwrite(kHeader, sizeof kHeader - 1, 1, file) == 1 &&
        fwrite(kernel, sizeof kernel, 1, file) == 1);
  CHECK(fclose(file) == 0);
  nib_quantize_desc how = SIZED(nib_quantize_desc);
  how.scheme = "u4b8g8";
  nib_transform_desc of_convs = SIZED(nib_transform_desc);
  of_convs.quantize = &how;
  of_convs.overwrite = 1;
  snprintf(out, sizeof out, "%s/conv-u4.safetensors", scratch);
  FAILS(NIB_INVALID_ARGUMENT, "no dense layer is left", nib_checkpoint_quantize(path, out, &of_convs, NULL));
  of_convs.convs = 1;
  OK(nib_checkpoint_quantize(path, out, &of_convs, &report));
  CHECK(strstr(report, "net.conv\tu4b8g8") != NULL);
  nib_text_free(report);
  of_convs.max_shard_bytes = 1;
  FAILS(NIB_INVALID_ARGUMENT, "only a directory has shards", nib_checkpoint_quantize(path, out, &of_convs, NULL));

  FAILS(NIB_NOT_FOUND, "/nowhere", nib_checkpoint_open("/nowhere", &s8_checkpoint));
  FAILS(NIB_INVALID_ARGUMENT, "path is NULL", nib_checkpoint_open(NULL, &s8_checkpoint));
  FAILS(NIB_NOT_FOUND, "model.none", nib_checkpoint_find_module(checkpoint, "model.none", &index));
  FAILS(NIB_INVALID_ARGUMENT, "module 1", nib_checkpoint_module(checkpoint, 1, &module));
  FAILS(NIB_INVALID_ARGUMENT, "tensor 4", nib_checkpoint_tensor(checkpoint, 4, &answer));
  FAILS(NIB_NOT_FOUND, "gguf", (transform.format = "gguf", nib_checkpoint_convert(path, out, &transform, NULL)));
  nib_qtensor* q = NULL;
  OK(nib_checkpoint_read_part(checkpoint, 0, NIB_OUTPUTS, 0, 8, &q, NULL)); /* all of them */
  OK(nib_qtensor_destroy(q));
  q = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "[0,9)", nib_checkpoint_read_part(checkpoint, 0, NIB_OUTPUTS, 0, 9, &q, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "NIB_INPUTS", nib_checkpoint_read_part(checkpoint, 0, 7, 0, 8, &q, NULL));
  snprintf(path, sizeof path, "%s/dense", scratch);
  nib_checkpoint* dense = NULL;
  OK(nib_checkpoint_open(path, &dense));
  OK(nib_checkpoint_read(dense, 0, &q, NULL)); /* as it is: floats in the place of codes, and no scales */
  nib_qtensor_desc floats = SIZED(nib_qtensor_desc);
  OK(nib_qtensor_get(q, &floats));
  CHECK(strcmp(floats.scheme, "f32") == 0 && floats.codes.dtype == NIB_F32 && floats.codes.shape[1] == floats.k);
  CHECK(floats.scales.data == NULL);
  nib_qtensor* copy = NULL;
  OK(nib_qtensor_create(&floats, &copy));
  OK(nib_qtensor_destroy(copy));
  copy = NULL;
  floats.codes.dtype = NIB_BF16;
  FAILS(NIB_INVALID_ARGUMENT, "codes are bf16", nib_qtensor_create(&floats, &copy));
  OK(nib_qtensor_destroy(q));
  q = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "no module 0", nib_checkpoint_read(answers, 0, &q, NULL));
  OK(nib_checkpoint_destroy(dense));
  CHECK(q == NULL);
  OK(nib_checkpoint_destroy(checkpoint));
  OK(nib_checkpoint_destroy(answers));
}

void test_packed_files(const char* golden, const char* scratch) {
  char in[1024], path[1024], file_path[1024];
  snprintf(in, sizeof in, "%s/awq/g128", golden);
  snprintf(path, sizeof path, "%s/packed", scratch);
  snprintf(file_path, sizeof file_path, "%s/packed.nibble", scratch);
  remove(file_path);
  nib_transform_desc convert = SIZED(nib_transform_desc);
  convert.overwrite = 1;
  OK(nib_checkpoint_convert(in, path, &convert, NULL));
  nib_checkpoint* checkpoint = NULL;
  OK(nib_checkpoint_open(path, &checkpoint));
  nib_packed_file* file = NULL;
  char* text = NULL;
  FAILS(NIB_NOT_FOUND, "packed.nibble", nib_packed_file_beside(checkpoint, &file, &text));

  nib_weight *weight = NULL, *loaded = NULL, *again = NULL;
  OK(nib_packed_weight(checkpoint, 0, NULL, NULL, &weight, &text));
  CHECK(strcmp(text, "there is no packed file") == 0);
  nib_text_free(text);
  const char* const names[] = {"model.proj", "other"};
  const nib_weight* const weights[] = {weight, weight};
  OK(nib_packed_file_save(file_path, names, weights, 2, checkpoint, 0));
  FAILS(NIB_ALREADY_EXISTS, "packed.nibble", nib_packed_file_save(file_path, names, weights, 2, NULL, 0));
  OK(nib_packed_file_save(file_path, names, weights, 2, checkpoint, 1));
  OK(nib_packed_file_beside(checkpoint, &file, &text));
  CHECK(strcmp(text, "") == 0);
  nib_text_free(text);

  nib_packed_file_info info = SIZED(nib_packed_file_info);
  OK(nib_packed_file_get(file, &info));
  CHECK(info.count == 2 && strcmp(info.library_version, nib_version_string()) == 0 && strcmp(info.checkpoint, "packed") == 0);
  size_t index = 9;
  OK(nib_packed_file_find_module(file, "model.proj", &index));
  nib_packed_module module = SIZED(nib_packed_module);
  OK(nib_packed_file_module(file, index, &module));
  nib_weight_info packed = SIZED(nib_weight_info), mapped = SIZED(nib_weight_info);
  OK(nib_weight_get(weight, &packed));
  CHECK(strcmp(module.name, "model.proj") == 0 && strcmp(module.scheme, "u4zg128") == 0 && module.n == 8 && module.k == 256);
  CHECK(strcmp(module.layout, packed.layout) == 0 && module.bytes == packed.bytes && module.has_bias && !module.act_order);
  CHECK(module.filter_height == 1 && module.filter_width == 1);
  OK(nib_packed_file_load(file, index, &loaded));
  OK(nib_weight_get(loaded, &mapped));
  CHECK(mapped.bytes == packed.bytes && mapped.data != packed.data && memcmp(mapped.data, packed.data, packed.bytes) == 0);
  OK(nib_packed_weight(checkpoint, 0, file, NULL, &again, &text));
  CHECK(strcmp(text, "") == 0);
  nib_text_free(text);
  nib_weight_info found = SIZED(nib_weight_info);
  OK(nib_weight_get(again, &found));
  CHECK(found.data == mapped.data);
  OK(nib_weight_destroy(again));
  OK(nib_download(loaded, &again)); /* of a weight in host memory: the same */
  OK(nib_weight_destroy(again));

  FAILS(NIB_NOT_FOUND, "'down'", nib_packed_file_find_module(file, "down", &index));
  FAILS(NIB_INVALID_ARGUMENT, "no weight 2", nib_packed_file_load(file, 2, &again));
  FAILS(NIB_INVALID_ARGUMENT, "no module 7", nib_packed_weight(checkpoint, 7, file, NULL, &again, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "names is NULL", nib_packed_file_save(file_path, NULL, weights, 2, NULL, 1));
  const nib_weight* const none[] = {NULL};
  FAILS(NIB_INVALID_ARGUMENT, "nib_weight is NULL", nib_packed_file_save(file_path, names, none, 1, NULL, 1));
  nib_packed_file* bad = NULL;
  snprintf(in, sizeof in, "%s/awq/g128.expected.safetensors", golden);
  FAILS(NIB_CORRUPT_DATA, "nibble pack", nib_packed_file_open(in, &bad));
  OK(nib_packed_file_open(file_path, &bad));
  OK(nib_packed_file_destroy(bad));
  OK(nib_packed_file_destroy(file)); /* the weight keeps its bytes */
  float w[8 * 256], same[8 * 256];
  dequantize(weight, w, 8, 256);
  dequantize(loaded, same, 8, 256);
  CHECK(memcmp(w, same, sizeof w) == 0);
  OK(nib_weight_destroy(loaded));
  OK(nib_weight_destroy(weight));
  OK(nib_checkpoint_destroy(checkpoint));
}
