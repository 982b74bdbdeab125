/* The InfiniOp-style operator on an AWQ checkpoint, against the values an independent program computed, bit for bit. */
#include <infiniop_dequantize_awq.h>
#include <nibble/nibble.h>
#include <stdio.h>
#include <string.h>

static int failures;
#define CHECK(condition) \
  if (!(condition)) ++failures, printf("%s:%d: %s is false; %.300s\n", __FILE__, __LINE__, #condition, nib_last_error())

static nib_stored_tensor find(const nib_checkpoint* checkpoint, const char* name) {
  size_t index = 0;
  nib_stored_tensor tensor = {.struct_size = sizeof tensor};
  CHECK(nib_checkpoint_find_tensor(checkpoint, name, &index) == NIB_OK);
  CHECK(nib_checkpoint_tensor(checkpoint, index, &tensor) == NIB_OK);
  return tensor;
}

static struct InfiniopTensorDescriptor dense(infiniDtype_t dtype, size_t rows, size_t columns) {
  struct InfiniopTensorDescriptor t = {dtype, 2, {rows, columns}, {(ptrdiff_t)columns, 1}};
  return t;
}

int main(int argc, char** argv) {
  enum { n = 8, k = 256, g = 2 };
  char path[1024];
  if (argc != 2) return 2;
  nib_checkpoint *checkpoint = NULL, *answers = NULL;
  snprintf(path, sizeof path, "%s/awq/g128", argv[1]);
  CHECK(nib_checkpoint_open(path, &checkpoint) == NIB_OK);
  snprintf(path, sizeof path, "%s/awq/g128.expected.safetensors", argv[1]);
  CHECK(nib_checkpoint_open(path, &answers) == NIB_OK);
  if (failures) return 1;
  const nib_stored_tensor qweight = find(checkpoint, "model.proj.qweight"), zeros = find(checkpoint, "model.proj.qzeros"),
                          scales = find(checkpoint, "model.proj.scales"), answer = find(answers, "model.proj.f16");

  struct InfiniopHandle cpu = {INFINI_DEVICE_CPU}, other = {(infiniDevice_t)7};
  struct InfiniopTensorDescriptor o = dense(INFINI_DTYPE_F16, k, n), q = dense(INFINI_DTYPE_I32, k, n / 8),
                                  s = dense(INFINI_DTYPE_F16, g, n), z = dense(INFINI_DTYPE_I32, g, n / 8);
  infiniopDequantizeAWQDescriptor_t descriptor = NULL;
  CHECK(infiniopCreateDequantizeAWQDescriptor(&cpu, &descriptor, &o, &q, &s, &z) == INFINI_STATUS_SUCCESS);
  size_t size = 99;
  CHECK(infiniopGetDequantizeAWQWorkspaceSize(descriptor, &size) == INFINI_STATUS_SUCCESS && size == 0);
  unsigned short out[k * n], expected[n * k];
  memcpy(expected, answer.view.data, sizeof expected);
  CHECK(infiniopDequantizeAWQ(descriptor, NULL, 0, out, qweight.view.data, scales.view.data, zeros.view.data, NULL) ==
        INFINI_STATUS_SUCCESS);
  for (int i = 0; i < k * n; ++i) CHECK(out[i] == expected[i % n * k + i / n]);
  CHECK(infiniopDequantizeAWQ(descriptor, NULL, 0, out, qweight.view.data, NULL, zeros.view.data, NULL) ==
        INFINI_STATUS_NULL_POINTER);
  CHECK(infiniopDequantizeAWQ(descriptor, NULL, 0, (char*)out + 1, qweight.view.data, scales.view.data, zeros.view.data, NULL) ==
        INFINI_STATUS_BAD_PARAM);
  infiniopDestroyDequantizeAWQDescriptor(descriptor);

  /* Mismatched arguments are refused before anything is created. */
  infiniopDequantizeAWQDescriptor_t none = NULL;
#define REFUSED(status, tensor, change)                                                    \
  do {                                                                                     \
    const struct InfiniopTensorDescriptor before = tensor;                                 \
    change;                                                                                \
    CHECK(infiniopCreateDequantizeAWQDescriptor(&cpu, &none, &o, &q, &s, &z) == (status)); \
    tensor = before;                                                                       \
  } while (0)
  REFUSED(INFINI_STATUS_BAD_TENSOR_DTYPE, o, o.dtype = INFINI_DTYPE_I32);
  REFUSED(INFINI_STATUS_BAD_TENSOR_DTYPE, s, s.dtype = INFINI_DTYPE_I32);
  REFUSED(INFINI_STATUS_BAD_TENSOR_SHAPE, o, o.shape[1] = 12);
  REFUSED(INFINI_STATUS_BAD_TENSOR_SHAPE, o, o.shape[0] = 0);
  REFUSED(INFINI_STATUS_BAD_TENSOR_SHAPE, q, q.shape[1] = 2);
  REFUSED(INFINI_STATUS_BAD_TENSOR_SHAPE, s, s.shape[0] = 3);
  REFUSED(INFINI_STATUS_BAD_TENSOR_SHAPE, z, z.ndim = 1);
  REFUSED(INFINI_STATUS_BAD_TENSOR_STRIDES, z, z.strides[0] = 2);
  CHECK(infiniopCreateDequantizeAWQDescriptor(&other, &none, &o, &q, &s, &z) == INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED);
  CHECK(infiniopCreateDequantizeAWQDescriptor(NULL, &none, &o, &q, &s, &z) == INFINI_STATUS_NULL_POINTER);
  CHECK(none == NULL);
  nib_checkpoint_destroy(checkpoint);
  nib_checkpoint_destroy(answers);
  printf("%d failures\n", failures);
  return failures != 0;
}
