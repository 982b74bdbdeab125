/* The C interface from C11: every kind of caller's mistake. */
#include <math.h>
#include <nibble/nibble.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "c_api_test.h"

/* Descriptions of matrices that contradict themselves. */
void test_bad_qtensors(void) {
  nib_qtensor* q = NULL;
  nib_qtensor_desc desc;
#define BAD(status, part, change) FAILS(status, part, (desc = describe(), change, nib_qtensor_create(&desc, &q)))
  BAD(NIB_INVALID_ARGUMENT, "struct_size is 0", desc.struct_size = 0);
  BAD(NIB_INVALID_ARGUMENT, "struct_size", desc.struct_size = 12345678);
  BAD(NIB_INVALID_ARGUMENT, "struct_size", desc.struct_size -= 4);
  BAD(NIB_INVALID_ARGUMENT, "scheme is NULL", desc.scheme = NULL);
  BAD(NIB_INVALID_ARGUMENT, "'u4'", desc.scheme = "u4");
  BAD(NIB_INVALID_ARGUMENT, "for weights", desc.scheme = "s8r_s8c");
  BAD(NIB_INVALID_ARGUMENT, "no zero points", desc.scheme = "u4g32");
  BAD(NIB_INVALID_ARGUMENT, "scales", desc.scheme = "u4zg16");
  BAD(NIB_INVALID_ARGUMENT, "N=0 is outside", desc.n = 0);
  BAD(NIB_INVALID_ARGUMENT, "K=-1 is outside", desc.k = -1);
  BAD(NIB_INVALID_ARGUMENT, "codes are", desc.codes.data = NULL);
  BAD(NIB_INVALID_ARGUMENT, "codes are f32", (desc.codes = nib_matrix(scales, NIB_F32, N, K), desc.codes.strides[0] = 0));
  BAD(NIB_INVALID_ARGUMENT, "is no type of whole bytes", desc.codes.dtype = NIB_U4);
  BAD(NIB_INVALID_ARGUMENT, "no nib_dtype", desc.codes.dtype = 77);
  BAD(NIB_INVALID_ARGUMENT, "no nib_dtype", desc.codes.dtype = -5);
  BAD(NIB_INVALID_ARGUMENT, "rank 7", desc.codes.rank = 7);
  BAD(NIB_INVALID_ARGUMENT, "negative", desc.codes.shape[1] = -96);
  BAD(NIB_INVALID_ARGUMENT, "negative", desc.codes.strides[0] = -96);
  BAD(NIB_INVALID_ARGUMENT, "overflows", desc.codes.shape[0] = INT64_MAX);
  BAD(NIB_INVALID_ARGUMENT, "overflows", desc.codes.strides[0] = INT64_MAX / 2);
  BAD(NIB_INVALID_ARGUMENT, "not aligned", desc.scales.data = (char*)scales + 1);
  BAD(NIB_INVALID_ARGUMENT, "scales of type s32", desc.scales.dtype = NIB_S32);
  BAD(NIB_INVALID_ARGUMENT, "zeros are f32", desc.zeros = desc.scales);
  BAD(NIB_INVALID_ARGUMENT, "g_idx", desc.g_idx.shape[0] = K - 1);
  BAD(NIB_INVALID_ARGUMENT, "g_idx", desc.g_idx.dtype = NIB_F32);
  BAD(NIB_INVALID_ARGUMENT, "prescale", desc.prescale.dtype = NIB_S32);
  BAD(NIB_INVALID_ARGUMENT, "bias", desc.bias.shape[0] = 1);
  BAD(NIB_INVALID_ARGUMENT, "act_zero", desc.act_zero = g_idx);
  BAD(NIB_INVALID_ARGUMENT, "limit -1", desc.act_limit = (const float[]){-1});
  BAD(NIB_INVALID_ARGUMENT, "5x1 elements", desc.filter_height = 5);
  BAD(NIB_INVALID_ARGUMENT, "elements of the convolution", (desc.filter_height = INT64_MAX, desc.filter_width = 1ll << 33));
  BAD(NIB_INVALID_ARGUMENT, "elements of the convolution", desc.filter_width = -1);
  BAD(NIB_INVALID_ARGUMENT, "does not fit", (describe(), codes[5] = 16));
  BAD(NIB_INVALID_ARGUMENT, "g_idx", g_idx[3] = G);
  BAD(NIB_INVALID_ARGUMENT, "g_idx", g_idx[3] = -1);
#undef BAD
  CHECK(q == NULL);
  FAILS(NIB_INVALID_ARGUMENT, "nib_qtensor_desc is NULL", nib_qtensor_create(NULL, &q));
  desc = describe();
  FAILS(NIB_INVALID_ARGUMENT, "handle to be made is NULL", nib_qtensor_create(&desc, NULL));

  float w[64] = {0};
  const nib_view vw = nib_matrix(w, NIB_F32, 2, 32), odd = nib_matrix((char*)w + 2, NIB_F32, 1, 15);
  nib_quantize_desc quantize = SIZED(nib_quantize_desc);
#define BAD(status, part, change) FAILS(status, part, (change, nib_quantize(NULL, &vw, &quantize, &q)))
  BAD(NIB_UNSUPPORTED, "u4g32", quantize.scheme = "u4g32");
  BAD(NIB_UNSUPPORTED, "u4b8zg32", quantize.scheme = "u4b8zg32");
  BAD(NIB_UNSUPPORTED, "u4fg32", quantize.scheme = "u4fg32");
  BAD(NIB_UNSUPPORTED, "e5m2c", quantize.scheme = "e5m2c");
  BAD(NIB_INVALID_ARGUMENT, "K=32", quantize.scheme = NULL);
  BAD(NIB_INVALID_ARGUMENT, "s32", (quantize.scheme = "s8c", quantize.scale = NIB_S32));
  BAD(NIB_INVALID_ARGUMENT, "NaN", (quantize.scale = NIB_NONE, w[40] = NAN));
#undef BAD
  FAILS(NIB_INVALID_ARGUMENT, "not aligned", nib_quantize(NULL, &odd, &quantize, &q));
  CHECK(nib_quantize(NULL, NULL, &quantize, &q) == NIB_INVALID_ARGUMENT);
  CHECK(q == NULL);
}

/* Runs that do not fit, structs of other versions, handles of other kinds. */
void test_bad_runs(void) {
  nib_qtensor* q = make_qtensor();
  nib_weight* weight = pack(q, NULL);
  nib_plan *plan = NULL, *none = NULL;
  nib_epilogue epilogue = SIZED(nib_epilogue);
  nib_linear_desc desc = SIZED(nib_linear_desc);
  desc.epilogue = &epilogue;
#define BAD(status, part, change)                                             \
  FAILS(status, part, (change, nib_plan_linear(weight, &desc, NULL, &none))); \
  epilogue = (nib_epilogue)SIZED(nib_epilogue), desc = (nib_linear_desc)SIZED(nib_linear_desc), desc.epilogue = &epilogue
  BAD(NIB_INVALID_ARGUMENT, "m_max=-1", desc.m_max = -1);
  BAD(NIB_UNSUPPORTED, "s32", desc.a_dtype = NIB_S32);
  BAD(NIB_INVALID_ARGUMENT, "no nib_dtype", desc.a_dtype = 1000);
  BAD(NIB_INVALID_ARGUMENT, "no scheme", desc.act_scheme = "int8");
  BAD(NIB_INVALID_ARGUMENT, "no scheme", desc.act_scheme = "");
  BAD(NIB_INVALID_ARGUMENT, "nib_linear_desc.accumulation is -1, neither NIB_FAST nor NIB_PRECISE", desc.accumulation = -1);
  BAD(NIB_UNSUPPORTED, "bits", epilogue.operands = 1u << 30);
  BAD(NIB_INVALID_ARGUMENT, "activation=77", epilogue.activation = 77);
  BAD(NIB_INVALID_ARGUMENT, "activation=-1", epilogue.activation = -1);
  BAD(NIB_UNSUPPORTED, "s32", epilogue.out = NIB_S32);
  BAD(NIB_INVALID_ARGUMENT, "out_scale", (epilogue.out = NIB_S8, epilogue.out_scale = -1));
  BAD(NIB_INVALID_ARGUMENT, "clamp", (epilogue.activation = NIB_ACTIVATION_CLAMP, epilogue.clamp_low = 1));
  BAD(NIB_INVALID_ARGUMENT, "negative_slope=inf must be finite",
      (epilogue.activation = NIB_ACTIVATION_LEAKY_RELU, epilogue.negative_slope = INFINITY));
  BAD(NIB_INVALID_ARGUMENT, "nib_epilogue.struct_size", epilogue.struct_size = 3);
#undef BAD
  nib_pack_desc packing = SIZED(nib_pack_desc);
  nib_linear_desc negative = SIZED(nib_linear_desc);
  negative.m_max = -4;
  nib_weight* no_weight = NULL;
  FAILS(NIB_NOT_FOUND, "layout", (packing.layout = "zigzag", nib_pack(q, &packing, &no_weight)));
  FAILS(NIB_NOT_FOUND, "kernel", (packing.layout = NULL, packing.kernel = "fast", nib_pack(q, &packing, &no_weight)));
  FAILS(NIB_INVALID_ARGUMENT, "backend 9", (packing.kernel = NULL, packing.backend = 9, nib_pack(q, &packing, &no_weight)));
  FAILS(NIB_INVALID_ARGUMENT, "m_max",
        (packing.backend = NIB_CPU, packing.linear = &negative, nib_pack(q, &packing, &no_weight)));
  CHECK(none == NULL && no_weight == NULL);

  nib_linear_desc precise = SIZED(nib_linear_desc);
  precise.accumulation = NIB_PRECISE;
  OK(nib_plan_linear(weight, &precise, NULL, &plan));
  OK(nib_plan_destroy(plan));

  /* A caller of an earlier version, whose struct ended sooner; one of a later version, with and without something new. */
  desc.m_max = 2;
  struct {
    nib_linear_desc known;
    uint64_t news;
  } later = {desc, 0};
  later.known.struct_size = sizeof later;
  nib_linear_desc* as_later = &later.known;
  OK(nib_plan_linear(weight, as_later, NULL, &plan));
  OK(nib_plan_destroy(plan));
  later.news = 1;
  FAILS(NIB_UNSUPPORTED, "byte 48", nib_plan_linear(weight, as_later, NULL, &none));
  nib_linear_desc earlier = desc;
  earlier.struct_size = offsetof(nib_linear_desc, a_dtype);
  earlier.a_dtype = 999; /* beyond its end */
  OK(nib_plan_linear(weight, &earlier, NULL, &plan));
  nib_weight_info info = SIZED(nib_weight_info);
  info.struct_size = offsetof(nib_weight_info, data);
  info.data = "untouched";
  OK(nib_weight_get(weight, &info));
  CHECK(info.layout != NULL && strcmp(info.data, "untouched") == 0 && info.struct_size == offsetof(nib_weight_info, data));
  info.struct_size = 0;
  FAILS(NIB_INVALID_ARGUMENT, "nib_weight_info.struct_size is 0", nib_weight_get(weight, &info));

  size_t bytes = 0;
  OK(nib_plan_workspace_size(plan, &bytes));
  CHECK(bytes > 0);
  void* workspace = malloc(bytes);
  float d[2 * N];
  const nib_view va = nib_matrix(a, NIB_F32, 2, K), vd = nib_matrix(d, NIB_F32, 2, N);
  nib_operands good = SIZED(nib_operands), operands;
  good.a = &va, good.d = &vd;
  OK(nib_plan_run(plan, weight, &good, workspace, bytes, NULL));
  memset(d, 0x55, sizeof d);
  const float untouched = d[0];
  nib_view view;
#define BAD(part, field, change)                               \
  view = *good.field, operands = good, operands.field = &view; \
  FAILS(NIB_INVALID_ARGUMENT, part, (change, nib_plan_run(plan, weight, &operands, workspace, bytes, NULL)))
  BAD("A has no data", a, operands.a = NULL);
  BAD("A has no data", a, view.data = NULL);
  BAD("D has no data", d, operands.d = NULL);
  BAD("not aligned to the 4 bytes of f32", a, view.data = (char*)a + 2);
  BAD("not aligned", d, view.data = (char*)d + 1);
  BAD("A is f16", a, view.dtype = NIB_F16);
  BAD("d: 99 is no nib_dtype", d, view.dtype = 99);
  BAD("[3,96]", a, view.shape[0] = 3);
  BAD("[2,95]", a, view.shape[1] = 95);
  BAD("rank 1", a, view.rank = 1);
  BAD("last stride", a, view.strides[1] = 2);
  BAD("negative", a, view.strides[0] = -K);
  BAD("overlap", d, view.strides[0] = 1);
  BAD("D is f32 [1,40]", d, view.shape[0] = 1);
#undef BAD
  FAILS(NIB_INVALID_ARGUMENT, "the workspace has 8 bytes", nib_plan_run(plan, weight, &good, workspace, 8, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "workspace", nib_plan_run(plan, weight, &good, NULL, 0, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "is NULL", nib_plan_run(plan, weight, &good, NULL, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "pass NULL for the stream", nib_plan_run(plan, weight, &good, workspace, bytes, &plan));
  FAILS(NIB_INVALID_ARGUMENT, "nib_operands is NULL", nib_plan_run(plan, weight, NULL, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "the nib_plan is NULL", nib_plan_run(NULL, weight, &good, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "the nib_weight is NULL", nib_plan_run(plan, NULL, &good, workspace, bytes, NULL));
  CHECK(memcmp(&d[0], &untouched, sizeof untouched) == 0);

  /* The stride of a dimension of one element may be any number; UBSan sees whether one is calculated with. */
  nib_view one_a = nib_matrix(a, NIB_F32, 1, K), one_d = nib_matrix(d, NIB_F32, 1, N);
  operands = good, operands.a = &one_a, operands.d = &one_d;
  one_a.strides[0] = one_d.strides[0] = INT64_MAX;
  OK(nib_plan_run(plan, weight, &operands, workspace, bytes, NULL));
  CHECK(memcmp(&d[0], &untouched, sizeof untouched) != 0);
  memset(d, 0x55, sizeof d);

  /* One handle in the place of another. */
  FAILS(NIB_INVALID_ARGUMENT, "no nib_plan",
        nib_plan_run((const nib_plan*)(const void*)weight, weight, &good, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "no nib_weight", nib_weight_destroy((nib_weight*)(void*)plan));
  FAILS(NIB_INVALID_ARGUMENT, "no nib_context",
        (operands = good, operands.context = (const nib_context*)(const void*)q,
         nib_plan_run(plan, weight, &operands, workspace, bytes, NULL)));
  OK(nib_weight_destroy(NULL));
  OK(nib_plan_destroy(NULL));
  OK(nib_context_destroy(NULL));
  OK(nib_checkpoint_destroy(NULL));
  OK(nib_qtensor_destroy(NULL));
  OK(nib_gpu_memory_destroy(NULL));

#ifdef COUNT_ALLOCATIONS
  const long before = atomic_load(&allocations);
  OK(nib_plan_run(plan, weight, &good, workspace, bytes, NULL));
  CHECK(atomic_load(&allocations) == before);
  char* counted = NULL; /* the library's allocations are counted too */
  OK(nib_plan_explain(plan, &counted));
  CHECK(atomic_load(&allocations) > before);
  nib_text_free(counted);
#endif

  OK(nib_plan_destroy(plan));
  OK(nib_weight_destroy(weight));
#ifdef NIBBLE_CHECK_HANDLES
  FAILS(NIB_INVALID_ARGUMENT, "destroyed", nib_weight_destroy(weight));
  FAILS(NIB_INVALID_ARGUMENT, "destroyed", nib_weight_get(weight, &info));
  FAILS(NIB_INVALID_ARGUMENT, "destroyed", nib_plan_run(plan, weight, &good, workspace, bytes, NULL));
#endif
  free(workspace);
  OK(nib_qtensor_destroy(q));
}
