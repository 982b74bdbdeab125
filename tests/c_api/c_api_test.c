/* The C interface from C11: every function, with known values and with every kind of caller's mistake. The files beside this one have
 * the tests of a subject each. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <nibble/nibble.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "c_api_test.h"

atomic_int failures;

/* Allocations of this program and of every library in it, where that can be counted. */
#ifdef COUNT_ALLOCATIONS
atomic_long allocations;
extern void* __libc_malloc(size_t bytes);
void* malloc(size_t bytes) {
  atomic_fetch_add(&allocations, 1);
  return __libc_malloc(bytes);
}
#endif

/* Deterministic values in [-1, 1]. */
void fill(float* x, size_t count, unsigned seed) {
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(int)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

nib_weight* pack(const nib_qtensor* q, const char* act_scheme) {
  nib_linear_desc linear = SIZED(nib_linear_desc);
  linear.act_scheme = act_scheme;
  if (act_scheme != NULL && strchr(act_scheme, 't') != NULL) linear.a_dtype = NIB_S8; /* A brings its scale */
  linear.m_max = 8192;
  nib_pack_desc desc = SIZED(nib_pack_desc);
  desc.linear = &linear;
  nib_weight* weight = NULL;
  OK(nib_pack(q, &desc, &weight));
  return weight;
}

/* W in f32 [N,K] of a packed weight. */
void dequantize(const nib_weight* weight, float* w, int64_t n, int64_t k) {
  nib_plan* plan = NULL;
  OK(nib_plan_dequantize(weight, NULL, NULL, &plan));
  size_t bytes = 0;
  OK(nib_plan_workspace_size(plan, &bytes));
  void* workspace = malloc(bytes + 1);
  const nib_view d = nib_matrix(w, NIB_F32, n, k);
  nib_operands operands = SIZED(nib_operands);
  operands.d = &d;
  OK(nib_plan_run(plan, weight, &operands, workspace, bytes, NULL));
  free(workspace);
  OK(nib_plan_destroy(plan));
}

nib_status execute(const nib_plan* plan, const nib_weight* weight, const nib_operands* operands) {
  size_t bytes = 0;
  OK(nib_plan_workspace_size(plan, &bytes));
  void* workspace = malloc(bytes + 1);
  const nib_status status = nib_plan_run(plan, weight, operands, workspace, bytes, NULL);
  free(workspace);
  return status;
}

static void test_library(void) {
  static const char* const kNames[] = {"none", "f64",  "f32",  "f16",  "bf16",  "e4m3",  "e5m2",  "e4m3fnuz", "e5m2fnuz",
                                       "e8m0", "e3m2", "e2m3", "e2m1", "bool",  "s8",    "s16",   "s32",      "s64",
                                       "u8",   "u16",  "u32",  "u64",  "u2",    "u3",    "u4",    "u5",       "u6",
                                       "u7",   "u2b2", "u3b4", "u4b8", "u5b16", "u6b32", "u7b64", "u8b128",   "c64"};
  CHECK(sizeof kNames / sizeof *kNames == NIB_C64 + 1);
  for (nib_dtype t = NIB_NONE; t <= NIB_C64; ++t) {
    CHECK(strcmp(nib_dtype_name(t), kNames[t]) == 0);
    CHECK(nib_dtype_parse(kNames[t]) == t);
  }
  CHECK(nib_dtype_name(-1) == NULL && nib_dtype_name(NIB_C64 + 1) == NULL);
  CHECK(nib_dtype_parse("float") == NIB_NONE && nib_dtype_parse(NULL) == NIB_NONE);
  CHECK(strcmp(nib_status_name(NIB_OK), "ok") == 0 && strcmp(nib_status_name(NIB_INTERNAL), "internal") == 0);
  CHECK(strcmp(nib_status_name(99), "unknown") == 0);
  CHECK(nib_abi_version() == NIB_ABI_VERSION);
  CHECK(strcmp(nib_version_string(), EXPECTED_VERSION) == 0);
  CHECK(strcmp(nib_last_error(), "") == 0);

  char* text = NULL;
  OK(nib_kernels(&text));
  CHECK(strstr(text, "linear_any_any_any__ref_baseline\tref\tlinear") != NULL);
  nib_text_free(text);
  OK(nib_layouts(&text));
  CHECK(strstr(text, "cpu_n16\tcpu\n  ") != NULL);
  nib_text_free(text);
  OK(nib_formats(&text));
  CHECK(strstr(text, "awq\tread+write\t") != NULL);
  nib_text_free(text);
  nib_text_free(NULL);
  OK(nib_kernels(NULL));

  nib_cpu cpu = SIZED(nib_cpu);
  OK(nib_get_cpu(&cpu));
  CHECK(cpu.struct_size == sizeof cpu && cpu.cores >= 1 && cpu.isa[0] != '\0' && cpu.memory_bytes > 0);
}

uint8_t codes[N * K];
float scales[G * N], a[M * K];
static float prescale[K], bias[N];
static uint8_t zeros[N * G];
int32_t g_idx[K];
static const float scale2 = 0.5f;

nib_qtensor_desc describe(void) {
  fill(scales, G * N, 1);
  fill(prescale, K, 2);
  fill(bias, N, 3);
  fill(a, M * K, 4);
  for (int i = 0; i < G * N; ++i) scales[i] = (float)(1 + (i * 7) % 13) / 64;
  for (int i = 0; i < K; ++i) prescale[i] = 1 + prescale[i] / 4, g_idx[i] = (i * 5) % G;
  for (int i = 0; i < N * K; ++i) codes[i] = (uint8_t)((i * 11 + i / 17) % 16);
  for (int i = 0; i < N * G; ++i) zeros[i] = (uint8_t)((i * 3) % 16);
  nib_qtensor_desc desc = SIZED(nib_qtensor_desc);
  desc.scheme = "u4zg32";
  desc.n = N;
  desc.k = K;
  desc.codes = nib_matrix(codes, NIB_U8, N, K);
  desc.scales = nib_matrix(scales, NIB_F32, N, G);
  desc.scales.strides[0] = 1, desc.scales.strides[1] = N;
  desc.zeros = nib_matrix(zeros, NIB_U8, N, G);
  desc.g_idx = nib_vector(g_idx, NIB_S32, K);
  desc.prescale = nib_vector(prescale, NIB_F32, K);
  desc.bias = nib_vector(bias, NIB_F32, N);
  desc.scale2 = &scale2;
  return desc;
}

static double weight_value(int n, int k) {
  const int g = g_idx[k];
  return ((double)codes[n * K + k] - zeros[n * G + g]) * scales[g * N + n] * scale2;
}

nib_qtensor* make_qtensor(void) {
  const nib_qtensor_desc desc = describe();
  nib_qtensor* q = NULL;
  OK(nib_qtensor_create(&desc, &q));
  return q;
}

static void test_qtensor(void) {
  nib_qtensor* q = make_qtensor();
  nib_qtensor_desc got = SIZED(nib_qtensor_desc);
  OK(nib_qtensor_get(q, &got));
  CHECK(strcmp(got.scheme, "u4zg32") == 0 && got.n == N && got.k == K);
  CHECK(memcmp(got.codes.data, codes, sizeof codes) == 0);
  CHECK(memcmp(got.zeros.data, zeros, sizeof zeros) == 0);
  CHECK(memcmp(got.g_idx.data, g_idx, sizeof g_idx) == 0);
  CHECK(memcmp(got.bias.data, bias, sizeof bias) == 0);
  CHECK(got.scales.shape[0] == N && got.scales.shape[1] == G && got.scales.strides[1] == 1);
  for (int n = 0; n < N; ++n)
    for (int g = 0; g < G; ++g) CHECK(((const float*)got.scales.data)[n * G + g] == scales[g * N + n]);
  CHECK(got.scale2 != NULL && *got.scale2 == scale2 && got.act_scale == NULL && got.act_limit == NULL && got.act_zero == NULL);

  /* A description that was read makes an equal matrix, also after packing. */
  nib_qtensor *again = NULL, *unpacked = NULL;
  OK(nib_qtensor_create(&got, &again));
  nib_weight* weight = pack(again, NULL);
  OK(nib_unpack(weight, &unpacked));
  nib_qtensor_desc second = SIZED(nib_qtensor_desc);
  OK(nib_qtensor_get(unpacked, &second));
  CHECK(memcmp(second.codes.data, codes, sizeof codes) == 0 && memcmp(second.g_idx.data, g_idx, sizeof g_idx) == 0);
  nib_weight_info info = SIZED(nib_weight_info);
  OK(nib_weight_get(weight, &info));
  CHECK(info.n == N && info.k == K && info.has_bias && info.act_order && info.backend == NIB_CPU);
  CHECK(info.data != NULL && info.bytes >= N * K / 2 && strcmp(info.scheme, "u4zg32") == 0 && info.layout[0] != '\0');

  float w[N * K];
  dequantize(weight, w, N, K);
  for (int i = 0; i < N * K; ++i) CHECK(w[i] == (float)weight_value(i / K, i % K));
  OK(nib_weight_destroy(weight));
  OK(nib_qtensor_destroy(unpacked));
  OK(nib_qtensor_destroy(again));
  OK(nib_qtensor_destroy(q));
}

/* D by its definition, in double. */
static double expected(int m, int n, const float* row_scale, const float* col_scale, const float* gate, const float* residual) {
  double x = 0;
  for (int k = 0; k < K; ++k) x += (double)a[m * K + k] * prescale[k] * weight_value(n, k);
  x = x * row_scale[m] * col_scale[n] + bias[n];
  x = x / (1 + exp(-x)); /* silu */
  return x * gate[m * N + n] + residual[m * N + n];
}

static void test_linear(const nib_context* context) {
  nib_qtensor* q = make_qtensor();
  nib_weight* weight = pack(q, NULL);
  float row_scale[M], col_scale[N], gate[M * N], residual[M * N], d[M * N];
  fill(row_scale, M, 5);
  fill(col_scale, N, 6);
  fill(gate, M * N, 7);
  fill(residual, M * N, 8);

  nib_epilogue epilogue = SIZED(nib_epilogue);
  epilogue.operands = NIB_ROW_SCALE | NIB_COL_SCALE | NIB_BIAS | NIB_GATE | NIB_RESIDUAL;
  epilogue.activation = NIB_ACTIVATION_SILU;
  nib_linear_desc desc = SIZED(nib_linear_desc);
  desc.epilogue = &epilogue;
  desc.m_max = M;
  nib_plan* plan = NULL;
  OK(nib_plan_linear(weight, &desc, NULL, &plan));

  const nib_view va = nib_matrix(a, NIB_F32, M, K), vd = nib_matrix(d, NIB_F32, M, N), vr = nib_vector(row_scale, NIB_F32, M),
                 vc = nib_vector(col_scale, NIB_F32, N), vg = nib_matrix(gate, NIB_F32, M, N),
                 vs = nib_matrix(residual, NIB_F32, M, N), vb = nib_vector(bias, NIB_F32, N);
  nib_operands operands = SIZED(nib_operands);
  operands.context = context;
  operands.a = &va, operands.d = &vd, operands.row_scale = &vr, operands.col_scale = &vc, operands.gate = &vg;
  operands.residual = &vs;
  size_t all_bytes = 0, bytes = 0;
  OK(nib_plan_workspace_size(plan, &all_bytes));
  OK(nib_plan_workspace_size_for(plan, M, &bytes));
  CHECK(bytes == all_bytes);
  OK(nib_plan_workspace_size_for(plan, M + 1, &bytes));
  CHECK(bytes == all_bytes);
  OK(nib_plan_workspace_size_for(plan, 1, &bytes));
  CHECK(bytes > 0 && bytes < all_bytes);
  FAILS(NIB_INVALID_ARGUMENT, "NULL", nib_plan_workspace_size_for(plan, 1, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "NULL", nib_plan_workspace_size_for(NULL, 1, &bytes));
  for (int own_bias = 0; own_bias < 2; ++own_bias) {
    operands.bias = own_bias ? NULL : &vb;
    memset(d, 0xff, sizeof d);
    OK(execute(plan, weight, &operands));
    for (int i = 0; i < M * N; ++i) CHECK(fabs(d[i] - expected(i / N, i % N, row_scale, col_scale, gate, residual)) < 1e-4);
  }

  /* The choice can be read, forced and refused. */
  const char* kernel = NULL;
  char* text = NULL;
  OK(nib_plan_kernel(plan, M, &kernel));
  OK(nib_plan_explain(plan, &text));
  CHECK(strncmp(text, "M = 1", 5) == 0 && strstr(text, kernel) != NULL && strstr(text, "\n  ") != NULL);
  nib_text_free(text);
  OK(nib_explain(q, NULL, NULL, &text));
  CHECK(strncmp(text, "M = 1", 5) == 0 && strstr(text, "__cpu_") != NULL);
  nib_text_free(text);
  FAILS(NIB_NOT_FOUND, "h100 and h200", nib_explain(q, NULL, "a100", &text));
  OK(nib_kernels(&text));
  CHECK(strstr(text, kernel) != NULL);
  nib_text_free(text);
  nib_plan_options options = SIZED(nib_plan_options);
  options.kernel = "linear_any_any_any__ref_baseline";
  nib_pack_desc packing = SIZED(nib_pack_desc);
  packing.kernel = options.kernel;
  nib_weight* plain_weight = NULL;
  OK(nib_pack(q, &packing, &plain_weight));
  nib_plan *forced = NULL, *none = NULL;
  OK(nib_plan_linear(plain_weight, &desc, &options, &forced));
  OK(nib_plan_kernel(forced, 1, &kernel));
  CHECK(strcmp(kernel, options.kernel) == 0);
  operands.next = weight; /* of any shape; kernels of the CPU ignore it */
  OK(execute(forced, plain_weight, &operands));
  for (int i = 0; i < M * N; ++i) CHECK(fabs(d[i] - expected(i / N, i % N, row_scale, col_scale, gate, residual)) < 1e-4);
  FAILS(NIB_INVALID_ARGUMENT, "the plan is for", execute(forced, weight, &operands));
  FAILS(NIB_UNSUPPORTED, "pack with kernel=linear_any_any_any__ref_baseline", nib_plan_linear(weight, &desc, &options, &none));
  OK(nib_plan_destroy(forced));
  options.forbid_reference = 1;
  FAILS(NIB_UNSUPPORTED, "reference is not allowed", nib_plan_linear(plain_weight, &desc, &options, &none));
  OK(nib_weight_destroy(plain_weight));
  OK(nib_plan_destroy(plan));

  /* leaky_relu has the slope 0.01 where none is given. */
  nib_epilogue leaky = SIZED(nib_epilogue);
  leaky.activation = NIB_ACTIVATION_LEAKY_RELU;
  desc.epilogue = &leaky;
  for (int given = 0; given < 2; ++given) {
    leaky.negative_slope = given ? -2.0f : 0.0f;
    OK(nib_plan_linear(weight, &desc, NULL, &plan));
    nib_operands no_more = SIZED(nib_operands);
    no_more.a = &va, no_more.d = &vd;
    OK(execute(plan, weight, &no_more));
    int below = 0;
    for (int i = 0; i < M * N; ++i) {
      double x = 0;
      for (int k = 0; k < K; ++k) x += (double)a[i / N * K + k] * prescale[k] * weight_value(i % N, k);
      below += x < 0;
      CHECK(fabs(d[i] - (x < 0 ? (given ? -2.0 : 0.01) * x : x)) <= 1e-4 * (1 + fabs(x)));
    }
    CHECK(below > 0);
    OK(nib_plan_destroy(plan));
  }

  /* s8 out of the epilogue; clamp is relu6 by default. */
  int8_t d8[M * N];
  nib_epilogue to_s8 = SIZED(nib_epilogue);
  to_s8.activation = NIB_ACTIVATION_CLAMP;
  to_s8.out = NIB_S8;
  to_s8.out_scale = 0.25f;
  to_s8.out_zero = -3;
  desc.epilogue = &to_s8;
  OK(nib_plan_linear(weight, &desc, NULL, &plan));
  const nib_view v8 = nib_matrix(d8, NIB_S8, M, N);
  nib_operands plain = SIZED(nib_operands);
  plain.a = &va, plain.d = &v8;
  OK(execute(plan, weight, &plain));
  int interior = 0, at_end = 0;
  for (int i = 0; i < M * N; ++i) {
    double x = 0;
    for (int k = 0; k < K; ++k) x += (double)a[i / N * K + k] * prescale[k] * weight_value(i % N, k);
    x = x < 0 ? 0 : x > 6 ? 6 : x;
    CHECK(fabs(d8[i] - (x / 0.25 - 3)) <= 0.51);
    interior += x > 0 && x < 6, at_end += x == 6;
  }
  CHECK(interior > 0 && at_end > 0);
  OK(nib_plan_destroy(plan));
  OK(nib_weight_destroy(weight));
  OK(nib_qtensor_destroy(q));
}

/* Integers: the sums of W8A8 as they are, with a bias; codes of u8 with a scale per channel and a range. */
static void test_integer_sums(void) {
  enum { M = 3, N = 5, K = 32 };
  static float w[N * K];
  int8_t a[M * K];
  int32_t bias[N], sums[M * N], zero = 7;
  uint8_t codes[M * N];
  float scales[N], a_scale = 0.01f;
  for (int i = 0; i < N * K; ++i) w[i] = (float)((i * 37) % 255 - 127);
  for (int i = 0; i < N; ++i) w[i * K] = 127, bias[i] = 1000 * i - 1500, scales[i] = 1.0f + (float)i;
  for (int i = 0; i < M * K; ++i) a[i] = (int8_t)((i * 91) % 256 - 128);
  nib_qtensor* q;
  nib_weight* weight;
  nib_plan* plan;
  const nib_view vw = nib_matrix(w, NIB_F32, N, K), va = nib_matrix(a, NIB_S8, M, K), vsums = nib_matrix(sums, NIB_S32, M, N);
  const nib_view vcodes = nib_matrix(codes, NIB_U8, M, N), vbias = nib_vector(bias, NIB_S32, N);
  const nib_view vscales = nib_vector(scales, NIB_F32, N), vzero = nib_vector(&zero, NIB_S32, 1);
  const nib_view va_scale = nib_vector(&a_scale, NIB_F32, 1);
  nib_quantize_desc rounding = SIZED(nib_quantize_desc);
  rounding.scheme = "s8c", rounding.scale = NIB_F32;
  OK(nib_quantize(NULL, &vw, &rounding, &q));
  OK(nib_pack(q, NULL, &weight));
  nib_qtensor_desc parts = SIZED(nib_qtensor_desc);
  OK(nib_qtensor_get(q, &parts));
  const float* w_scale = parts.scales.data;

  nib_epilogue epilogue = SIZED(nib_epilogue);
  epilogue.operands = NIB_SUM_BIAS;
  epilogue.out = NIB_S32;
  nib_linear_desc desc = SIZED(nib_linear_desc);
  desc.epilogue = &epilogue, desc.a_dtype = NIB_S8, desc.act_scheme = "s8r", desc.m_max = M;
  OK(nib_plan_linear(weight, &desc, NULL, &plan));
  nib_operands run = SIZED(nib_operands);
  run.a = &va, run.d = &vsums;
  FAILS(NIB_INVALID_ARGUMENT, "needs sum_bias", execute(plan, weight, &run));
  run.sum_bias = &vbias;
  OK(execute(plan, weight, &run));
  OK(nib_plan_destroy(plan));
  for (int i = 0; i < M * N; ++i) {
    int64_t sum = bias[i % N];
    for (int k = 0; k < K; ++k) sum += (int64_t)a[i / N * K + k] * (int64_t)w[i % N * K + k];
    CHECK(sums[i] == sum);
  }

  epilogue.operands = NIB_SUM_BIAS | NIB_OUT_SCALE;
  epilogue.out = NIB_U8, epilogue.out_low = 3, epilogue.out_high = 200;
  OK(nib_plan_linear(weight, &desc, NULL, &plan));
  run.d = &vcodes, run.a_scale = &va_scale, run.out_scale = &vscales, run.out_zero = &vzero;
  OK(execute(plan, weight, &run));
  int low = 0, inside = 0;
  for (int i = 0; i < M * N; ++i) {
    double code = sums[i] * 0.01 * w_scale[i % N] / scales[i % N] + zero;
    code = code < 3 ? 3 : code > 200 ? 200 : code;
    CHECK(fabs(codes[i] - code) <= 0.51);
    low += codes[i] == 3, inside += codes[i] > 3;
  }
  CHECK(low > 0 && inside > 0);
  OK(nib_plan_destroy(plan));
  OK(nib_weight_destroy(weight));
  OK(nib_qtensor_destroy(q));
}

/* MNN's matrix of a convolution: the first of two codes in the high half, parameters shared by all elements of the filter. */
/* The MLP's first half: the residual stream, RMSNorm, gate and up as one layer, silu and their product. */
static void test_block(void) {
  nib_qtensor* parts[2] = {make_qtensor(), make_qtensor()};
  nib_qtensor *joined = NULL, *none = NULL;
  OK(nib_join((const nib_qtensor* const*)parts, 2, &joined));
  FAILS(NIB_INVALID_ARGUMENT, "no weights to join", nib_join(NULL, 0, &none));
  FAILS(NIB_INVALID_ARGUMENT, "array of weights", nib_join(NULL, 2, &none));
  nib_qtensor_desc got = SIZED(nib_qtensor_desc);
  OK(nib_qtensor_get(joined, &got));
  CHECK(got.n == 2 * N && got.k == K && memcmp((const uint8_t*)got.codes.data + sizeof codes, codes, sizeof codes) == 0);

  nib_epilogue epilogue = SIZED(nib_epilogue);
  epilogue.operands = NIB_BIAS, epilogue.activation = NIB_ACTIVATION_SILU;
  epilogue.glu = 1, epilogue.glu_limit = 2, epilogue.glu_offset = 1;
  nib_norm norm = SIZED(nib_norm);
  norm.kind = NIB_NORM_RMS, norm.parts = NIB_NORM_ADD, norm.eps = 1e-5f, norm.weight_offset = 1;
  nib_linear_desc desc = SIZED(nib_linear_desc);
  desc.epilogue = &epilogue, desc.norm = &norm, desc.m_max = M;
  nib_pack_desc packing = SIZED(nib_pack_desc);
  packing.linear = &desc;
  nib_weight *weight = NULL, *no_weight = NULL;
  OK(nib_pack(joined, &packing, &weight));
  nib_weight_info info = SIZED(nib_weight_info);
  OK(nib_weight_get(weight, &info));
  CHECK(info.n == 2 * N && info.paired);
  nib_plan *plan = NULL, *no_plan = NULL;
  OK(nib_plan_linear(weight, NULL, NULL, &plan));

  float d[M * N], stream[M * K], norm_weight[K];
  fill(stream, M * K, 11);
  fill(norm_weight, K, 12);
  double x[M][K];
  for (int m = 0; m < M; ++m) {
    double squares = 0;
    for (int k = 0; k < K; ++k) {
      x[m][k] = (double)(a[m * K + k] + stream[m * K + k]);
      squares += x[m][k] * x[m][k] / K;
    }
    for (int k = 0; k < K; ++k) x[m][k] *= (norm_weight[k] + 1) / sqrt(squares + 1e-5) * prescale[k];
  }
  const nib_view va = nib_matrix(a, NIB_F32, M, K), vd = nib_matrix(d, NIB_F32, M, N), vs = nib_matrix(stream, NIB_F32, M, K),
                 vw = nib_vector(norm_weight, NIB_F32, K);
  nib_operands operands = SIZED(nib_operands);
  operands.a = &va, operands.d = &vd, operands.norm_weight = &vw, operands.norm_add = &vs, operands.norm_sum = &vs;
  float before[M * K];
  memcpy(before, stream, sizeof before);
  OK(execute(plan, weight, &operands));
  for (int i = 0; i < M * K; ++i) CHECK(stream[i] == a[i] + before[i]);
  for (int i = 0; i < M * N; ++i) {
    double sum = bias[i % N];
    for (int k = 0; k < K; ++k) sum += x[i / N][k] * weight_value(i % N, k);
    const double gate = sum < 2 ? sum : 2, other = sum < -2 ? -2 : gate;
    CHECK(fabs(d[i] - gate / (1 + exp(-gate)) * (other + 1)) < 1e-3);
  }
  operands.norm_weight = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "norm_weight", execute(plan, weight, &operands));

  desc.epilogue = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "packed for a glu", nib_plan_linear(weight, &desc, NULL, &no_plan));
  desc.epilogue = &epilogue;
  FAILS(NIB_INVALID_ARGUMENT, "no nib_norm_kind", (norm.kind = 9, nib_pack(joined, &packing, &no_weight)));
  FAILS(NIB_UNSUPPORTED, "bits", (norm.kind = NIB_NORM_RMS, norm.parts = 8, nib_pack(joined, &packing, &no_weight)));
  FAILS(NIB_INVALID_ARGUMENT, "norm.eps", (norm.parts = 0, norm.eps = -1, nib_pack(joined, &packing, &no_weight)));
  norm.eps = 0;
  FAILS(NIB_INVALID_ARGUMENT, "glu_limit=-1", (epilogue.glu_limit = -1, nib_pack(joined, &packing, &no_weight)));
  OK(nib_plan_destroy(plan));
  OK(nib_weight_destroy(weight));
  OK(nib_qtensor_destroy(joined));
  OK(nib_qtensor_destroy(parts[0]));
  OK(nib_qtensor_destroy(parts[1]));
}

/* An engine's own threads: here none, and the loop runs backwards. */
static void backwards(void* user, int64_t count, nib_loop_body call, void* body) {
  ++*(int*)user;
  for (int64_t i = count; i-- > 0;) call(body, i);
}

static void test_contexts(void) {
  int loops = 0;
  nib_context_desc desc = SIZED(nib_context_desc);
  desc.parallel_for = backwards;
  desc.user = &loops;
  desc.threads = 3;
  nib_context* context = NULL;
  OK(nib_context_create(&desc, &context));
  test_linear(context);
  CHECK(loops > 0);
  OK(nib_context_destroy(context));
  desc.parallel_for = NULL;
  OK(nib_context_create(&desc, &context));
  test_linear(context);
  OK(nib_context_destroy(context));
  OK(nib_context_create(NULL, &context));
  test_linear(context);
  OK(nib_context_destroy(context));
  desc.threads = -1;
  FAILS(NIB_INVALID_ARGUMENT, "threads=-1", nib_context_create(&desc, &context));
}

/* Many threads, one plan and weight; each has its own result and its own last error. */
struct shared {
  const nib_plan* plan;
  const nib_weight* weight;
  const float* expected;
};

static void* run_often(void* argument) {
  const struct shared* shared = argument;
  float d[M * N];
  const nib_view va = nib_matrix(a, NIB_F32, M, K), vd = nib_matrix(d, NIB_F32, M, N);
  nib_operands operands = SIZED(nib_operands);
  operands.a = &va, operands.d = &vd;
  CHECK(strcmp(nib_last_error(), "") == 0);
  for (int i = 0; i < 50; ++i) {
    memset(d, 0xff, sizeof d);
    OK(execute(shared->plan, shared->weight, &operands));
    CHECK(memcmp(d, shared->expected, sizeof d) == 0);
    if (i % 10 == 0) FAILS(NIB_INVALID_ARGUMENT, "nib_operands is NULL", execute(shared->plan, shared->weight, NULL));
  }
  return NULL;
}

static void test_threads(void) {
  nib_qtensor* q = make_qtensor();
  nib_weight* weight = pack(q, NULL);
  nib_linear_desc desc = SIZED(nib_linear_desc);
  desc.m_max = M;
  nib_plan* plan = NULL;
  OK(nib_plan_linear(weight, &desc, NULL, &plan));
  float d[M * N];
  const nib_view va = nib_matrix(a, NIB_F32, M, K), vd = nib_matrix(d, NIB_F32, M, N);
  nib_operands operands = SIZED(nib_operands);
  operands.a = &va, operands.d = &vd;
  OK(execute(plan, weight, &operands));
  struct shared shared = {plan, weight, d};
  FAILS(NIB_INVALID_ARGUMENT, "", nib_plan_kernel(NULL, 1, NULL));
  pthread_t threads[8];
  for (int i = 0; i < 8; ++i) CHECK(pthread_create(&threads[i], NULL, run_often, &shared) == 0);
  for (int i = 0; i < 8; ++i) pthread_join(threads[i], NULL);
  OK(nib_plan_destroy(plan));
  OK(nib_weight_destroy(weight));
  OK(nib_qtensor_destroy(q));
}

static void test_plan_cache(void) {
  nib_qtensor* q = make_qtensor();
  nib_weight* weight = pack(q, NULL);
  nib_plan_cache *cache = NULL, *none = NULL;
  nib_plan *first = NULL, *second = NULL, *failed = NULL;
  nib_plan_cache_info info = SIZED(nib_plan_cache_info);
  nib_linear_desc desc = SIZED(nib_linear_desc);
  OK(nib_plan_cache_create(1, &cache));
  desc.m_max = 3;
  OK(nib_plan_cache_linear(cache, weight, &desc, NULL, &first));
  desc.m_max = 4; /* which the first serves */
  OK(nib_plan_cache_linear(cache, weight, &desc, NULL, &second));
  OK(nib_plan_cache_get(cache, &info));
  CHECK(info.hits == 1 && info.misses == 1 && info.size == 1);
  OK(nib_plan_destroy(second));
  OK(nib_plan_cache_linear(cache, weight, NULL, NULL, &second)); /* for what it was packed for */
  const nib_conv_desc conv = SIZED(nib_conv_desc);
  FAILS(NIB_INVALID_ARGUMENT, "0x0", nib_plan_cache_conv(cache, weight, &conv, NULL, &failed));
  FAILS(NIB_INVALID_ARGUMENT, "was packed for a linear layer", nib_plan_cache_conv(cache, weight, NULL, NULL, &failed));
  desc.a_dtype = NIB_S64;
  FAILS(NIB_UNSUPPORTED, "s64", nib_plan_cache_linear(cache, weight, &desc, NULL, &failed));
  FAILS(NIB_INVALID_ARGUMENT, "nib_plan_cache is NULL", nib_plan_cache_linear(NULL, weight, NULL, NULL, &failed));
  FAILS(NIB_INVALID_ARGUMENT, "this is no nib_plan_cache", nib_plan_cache_get((const nib_plan_cache*)(const void*)q, &info));
  FAILS(NIB_INVALID_ARGUMENT, "nib_plan_cache_info is NULL", nib_plan_cache_get(cache, NULL));
  CHECK(failed == NULL);
  OK(nib_plan_cache_clear(cache));
  OK(nib_plan_cache_get(cache, &info));
  CHECK(info.hits == 1 && info.size == 0);
  OK(nib_plan_cache_destroy(cache));
  OK(nib_plan_cache_destroy(NULL));

  float d[M * N]; /* plans outlive their cache */
  const nib_view va = nib_matrix(a, NIB_F32, M, K), vd = nib_matrix(d, NIB_F32, M, N);
  nib_operands operands = SIZED(nib_operands);
  operands.a = &va, operands.d = &vd;
  OK(execute(second, weight, &operands));
  OK(nib_plan_cache_create(0, &none)); /* a default */
  OK(nib_plan_cache_destroy(none));
  OK(nib_plan_destroy(first));
  OK(nib_plan_destroy(second));
  OK(nib_weight_destroy(weight));
  OK(nib_qtensor_destroy(q));
}

/* On a GPU the same numbers; without one, the reason. */
static void test_gpu(void) {
  nib_gpu gpu = SIZED(nib_gpu);
  nib_gpu_memory* memory = NULL;
  nib_weight *weight = NULL, *host = NULL;
  nib_qtensor* q = make_qtensor();
  nib_pack_desc on_gpu = SIZED(nib_pack_desc), for_gpu = SIZED(nib_pack_desc);
  on_gpu.backend = NIB_CUDA;
  for_gpu.layout = "gpu_n64k128";
  OK(nib_pack(q, &for_gpu, &host));
  nib_weight_info info = SIZED(nib_weight_info);
  OK(nib_weight_get(host, &info));
  CHECK(strcmp(info.layout, "gpu_n64k128") == 0 && info.backend == NIB_CPU);

  const nib_view out = nib_matrix(a, NIB_F16, 8, 8);
  nib_checkpoint_tensors tensors = SIZED(nib_checkpoint_tensors);
  FAILS(NIB_INVALID_ARGUMENT, "qweight is NULL", nib_dequantize_checkpoint_tensors(&tensors, &out, 1, NULL));
  tensors.qweight = codes, tensors.qzeros = codes, tensors.scales = scales, tensors.n = 8, tensors.k = 8;
  FAILS(NIB_INVALID_ARGUMENT, "packing 7", (tensors.packing = 7, nib_dequantize_checkpoint_tensors(&tensors, &out, 1, NULL)));
  tensors.packing = NIB_AWQ;
  FAILS(NIB_INVALID_ARGUMENT, "not aligned",
        (tensors.scales = (char*)scales + 1, nib_dequantize_checkpoint_tensors(&tensors, &out, 1, NULL)));
  tensors.scales = scales;

  if (nib_get_gpu(&gpu) != NIB_OK) {
    FAILS(NIB_UNSUPPORTED, "", nib_get_gpu(&gpu));
    FAILS(NIB_UNSUPPORTED, "", nib_pack(q, &on_gpu, &weight));
    FAILS(NIB_UNSUPPORTED, "", nib_upload(host, &weight));
    FAILS(NIB_UNSUPPORTED, "", nib_gpu_memory_create(64, &memory));
    FAILS(NIB_UNSUPPORTED, "", nib_copy_to_gpu(a, a, 4, NULL));
    FAILS(NIB_UNSUPPORTED, "", nib_copy_from_gpu(a, a, 4, NULL));
    FAILS(NIB_UNSUPPORTED, "", nib_synchronize(NULL));
    FAILS(NIB_UNSUPPORTED, "", nib_dequantize_checkpoint_tensors(&tensors, &out, 1, NULL));
    printf("without a GPU: %s\n", nib_last_error());
  } else {
    OK(nib_upload(host, &weight));
    nib_linear_desc desc = SIZED(nib_linear_desc);
    desc.m_max = M;
    nib_plan* plan = NULL;
    OK(nib_plan_linear(weight, &desc, NULL, &plan));
    size_t bytes = 0;
    OK(nib_plan_workspace_size(plan, &bytes));
    const size_t d_at = sizeof a, workspace_at = d_at + M * N * sizeof(float);
    OK(nib_gpu_memory_create(workspace_at + bytes, &memory));
    void* data = NULL;
    OK(nib_gpu_memory_data(memory, &data));
    char* base = data;
    OK(nib_copy_to_gpu(base, a, sizeof a, NULL));
    const nib_view va = nib_matrix(base, NIB_F32, M, K), vd = nib_matrix(base + d_at, NIB_F32, M, N);
    nib_operands operands = SIZED(nib_operands);
    operands.a = &va, operands.d = &vd;
    OK(nib_plan_run(plan, weight, &operands, base + workspace_at, bytes, NULL));
    float d[M * N];
    OK(nib_copy_from_gpu(d, base + d_at, sizeof d, NULL));
    for (int i = 0; i < M * N; ++i) {
      double x = 0;
      for (int k = 0; k < K; ++k) x += (double)a[i / N * K + k] * prescale[k] * weight_value(i % N, k);
      CHECK(fabs(d[i] - x) < 1e-3);
    }
    OK(nib_plan_destroy(plan));
    nib_weight* back = NULL;
    nib_weight_info of_back = SIZED(nib_weight_info);
    OK(nib_download(weight, &back));
    OK(nib_weight_get(back, &of_back));
    CHECK(of_back.backend == NIB_CPU && of_back.bytes == info.bytes && memcmp(of_back.data, info.data, info.bytes) == 0);
    OK(nib_weight_destroy(back));
    OK(nib_gpu_memory_destroy(memory));
    OK(nib_weight_destroy(weight));
  }
  OK(nib_weight_destroy(host));
  OK(nib_qtensor_destroy(q));
}

static void test_roofline(void) {
  nib_roofline roofline = SIZED(nib_roofline);
  OK(nib_measure_roofline(NULL, &roofline));
  CHECK(roofline.read_gbytes_per_s > 0 && roofline.f32_gflops > 0 && roofline.threads >= 1);
  nib_qtensor* q = make_qtensor();
  nib_weight* weight = pack(q, NULL);
  nib_plan_options options = SIZED(nib_plan_options);
  options.machine = &roofline;
  nib_plan* plan = NULL;
  OK(nib_plan_linear(weight, NULL, &options, &plan));
  OK(nib_plan_destroy(plan));
  roofline.f32_gflops = 0;
  FAILS(NIB_INVALID_ARGUMENT, "was not measured", nib_plan_linear(weight, NULL, &options, &plan));
  OK(nib_weight_destroy(weight));
  OK(nib_qtensor_destroy(q));
}

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: %s GOLDEN SCRATCH\n", argv[0]), 2;
  mkdir(argv[2], 0777);
  test_library();
  test_qtensor();
  test_linear(NULL);
  test_integer_sums();
  test_block();
  test_nibbles();
  test_trtllm_codes();
  test_contexts();
  test_quantize();
  test_conv();
  test_checkpoint(argv[1], argv[2]);
  test_packed_files(argv[1], argv[2]);
  test_bad_qtensors();
  test_bad_runs();
  test_threads();
  test_plan_cache();
  test_experts();
  test_expert_layers(argv[2]);
  test_gpu();
  test_roofline();
  printf("%d failures\n", atomic_load(&failures));
  return atomic_load(&failures) != 0;
}
