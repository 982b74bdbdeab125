/* The C interface from C11: every function, with known values and with every kind of caller's mistake. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <nibble/nibble.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static atomic_int failures;
#define CHECK(condition)                                                                        \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      atomic_fetch_add(&failures, 1);                                                           \
      printf("%s:%d: %s is false; %.300s\n", __FILE__, __LINE__, #condition, nib_last_error()); \
    }                                                                                           \
  } while (0)
#define OK(call) CHECK((call) == NIB_OK)
/* The call fails with this status, and its text has `part`. */
#define FAILS(status, part, call)                                                                                   \
  do {                                                                                                              \
    const nib_status got_ = (call);                                                                                 \
    if (got_ != (status) || strstr(nib_last_error(), part) == NULL) {                                               \
      atomic_fetch_add(&failures, 1);                                                                               \
      printf("%s:%d: %s\n  gave %s: %.300s\n", __FILE__, __LINE__, #call, nib_status_name(got_), nib_last_error()); \
    }                                                                                                               \
  } while (0)
#define SIZED(type) \
  { .struct_size = sizeof(type) }

/* Allocations of this program and of every library in it, where that can be counted. */
#ifdef COUNT_ALLOCATIONS
static atomic_long allocations;
extern void* __libc_malloc(size_t bytes);
void* malloc(size_t bytes) {
  atomic_fetch_add(&allocations, 1);
  return __libc_malloc(bytes);
}
#endif

/* Deterministic values in [-1, 1]. */
static void fill(float* x, size_t count, unsigned seed) {
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(int)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

static nib_weight* pack(const nib_qtensor* q, const char* act_scheme) {
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
static void dequantize(const nib_weight* weight, float* w, int64_t n, int64_t k) {
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

static nib_status execute(const nib_plan* plan, const nib_weight* weight, const nib_operands* operands) {
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

/* 3 tokens through 40x96, u4zg32 with act-order, a bias, a pre-scale and scales as checkpoints have them, [G,N]. */
enum { M = 3, N = 40, K = 96, GROUP = 32, G = K / GROUP };
static uint8_t codes[N * K];
static float scales[G * N], prescale[K], bias[N], a[M * K];
static uint8_t zeros[N * G];
static int32_t g_idx[K];
static const float scale2 = 0.5f;

static nib_qtensor_desc describe(void) {
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

static nib_qtensor* make_qtensor(void) {
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

static void test_nibbles(void) {
  enum { N = 3, C = 4, TAPS = 6, K = C * TAPS, GROUP = 2 };
  uint8_t bytes[N * K / 2];
  float scales[N * C / GROUP], offsets[N * C / GROUP];
  for (int i = 0; i < N * K / 2; ++i) bytes[i] = (uint8_t)(i * 53 + 7);
  for (int i = 0; i < N * C / GROUP; ++i) scales[i] = 0.5f + (float)i, offsets[i] = (float)(i - 2);
  nib_qtensor* q;
  nib_qtensor_desc desc = SIZED(nib_qtensor_desc);
  desc.scheme = "u4b8g2";
  desc.n = N, desc.k = K, desc.filter_height = 2, desc.filter_width = 3;
  desc.codes = nib_matrix(bytes, NIB_U8, N, K / 2);
  desc.scales = nib_matrix(scales, NIB_F32, N, C / GROUP);
  desc.nibble_order = NIB_HIGH_FIRST, desc.repeat_for_filter = 1;
  OK(nib_qtensor_create(&desc, &q));
  nib_qtensor_desc got = SIZED(nib_qtensor_desc);
  OK(nib_qtensor_get(q, &got));
  CHECK(got.nibble_order == NIB_BYTES && got.repeat_for_filter == 0 && got.scales.shape[1] == K / GROUP);
  for (int i = 0; i < N * K; ++i)
    CHECK(((const uint8_t*)got.codes.data)[i] == (i % 2 == 0 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15));
  for (int i = 0; i < N * K / GROUP; ++i)
    CHECK(((const float*)got.scales.data)[i] == scales[i / (K / GROUP) * (C / GROUP) + i % (C / GROUP)]);
  OK(nib_qtensor_destroy(q));

  desc.scheme = "u4og2", desc.zeros = nib_matrix(offsets, NIB_F32, N, C / GROUP), desc.nibble_order = NIB_LOW_FIRST;
  OK(nib_qtensor_create(&desc, &q));
  OK(nib_qtensor_get(q, &got));
  CHECK(((const uint8_t*)got.codes.data)[1] == bytes[0] >> 4 && ((const float*)got.zeros.data)[2] == offsets[0]);
  OK(nib_qtensor_destroy(q));

  FAILS(NIB_INVALID_ARGUMENT, "nibble_order=7 is no nib_nibble_order", (desc.nibble_order = 7, nib_qtensor_create(&desc, &q)));
  FAILS(NIB_INVALID_ARGUMENT, "two codes a byte, [3,13]", (desc.nibble_order = 1, desc.k = 26, nib_qtensor_create(&desc, &q)));
  FAILS(NIB_INVALID_ARGUMENT, "for codes of 4 bits, u8og2 has 8",
        (desc.k = K, desc.scheme = "u8og2", nib_qtensor_create(&desc, &q)));
}

/* Codes as TensorRT-LLM lays them out: [K, N/2]. */
static void test_trtllm_codes(void) {
  enum { N = 2, K = 6 };
  const uint8_t bytes[N * K / 2] = {0x10, 0x32, 0x54,
                                    0x98, 0xba, 0xdc}; /* of each output channel signed codes, one after the other */
  const float scales[N] = {1, 2};
  nib_qtensor* q = NULL;
  nib_qtensor_desc desc = SIZED(nib_qtensor_desc), got = SIZED(nib_qtensor_desc);
  desc.scheme = "u4b8c", desc.n = N, desc.k = K;
  desc.codes = nib_matrix(bytes, NIB_U8, K, N / 2);
  desc.scales = nib_matrix(scales, NIB_F32, N, 1);
  desc.nibble_order = NIB_TRTLLM_TRANSPOSED;
  OK(nib_qtensor_create(&desc, &q));
  OK(nib_qtensor_get(q, &got));
  for (int i = 0; i < N * K; ++i) {
    const int code = bytes[i / 2] >> (i % 2 * 4) & 15;
    CHECK(((const uint8_t*)got.codes.data)[i] == (code ^ 8));
  }
  OK(nib_qtensor_destroy(q));
  FAILS(NIB_INVALID_ARGUMENT, "W[2,6]: this layout has K in multiples of 64",
        (desc.nibble_order = NIB_TRTLLM_INTERLEAVED, nib_qtensor_create(&desc, &q)));
  FAILS(NIB_INVALID_ARGUMENT, "are u4b8 or u8b128, u4zc has u4", (desc.scheme = "u4zc", nib_qtensor_create(&desc, &q)));
  FAILS(NIB_INVALID_ARGUMENT, "has bytes of [6,2] in TensorRT-LLM's layouts",
        (desc.scheme = "u8b128c", nib_qtensor_create(&desc, &q)));
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

/* Quantizing a float matrix, W8A8 with activations that come quantized, verification. */
static void test_quantize(void) {
  enum { n = 24, k = 64 };
  float w[n * k], x[M * k], from_codes[M * n], from_floats[M * n];
  fill(w, n * k, 9);
  fill(x, M * k, 10);
  const nib_view vw = nib_matrix(w, NIB_F32, n, k);

  static const char* const kSchemes[] = {"u4b8g32", "u4zg32", "u8b128c", "u3zg64", "s8c", "e4m3b16x32", "s8zt"};
  for (size_t i = 0; i < sizeof kSchemes / sizeof *kSchemes; ++i) {
    nib_quantize_desc desc = SIZED(nib_quantize_desc);
    desc.scheme = kSchemes[i];
    desc.scale = i % 2 ? NIB_F32 : NIB_NONE;
    nib_qtensor* q = NULL;
    OK(nib_quantize(NULL, &vw, &desc, &q));
    nib_qtensor_desc got = SIZED(nib_qtensor_desc);
    OK(nib_qtensor_get(q, &got));
    CHECK(strcmp(got.scheme, kSchemes[i]) == 0 && got.scales.dtype == (i % 2 ? NIB_F32 : NIB_F16));
    nib_quant_error error = SIZED(nib_quant_error);
    OK(nib_quantization_error(NULL, &vw, q, &error));
    CHECK(error.sqnr_db > 10 && error.cosine > 0.95 && error.relative_l2 < 0.3 && error.max_abs > 0);

    nib_verify_desc verify = SIZED(nib_verify_desc);
    nib_verify_report report = SIZED(nib_verify_report);
    char* failure = NULL;
    OK(nib_verify(q, &verify, &report, &failure));
    CHECK(report.passed && report.round_trip && report.repeatable && report.checked == n && report.worst_error_over_bound <= 1);
    CHECK(strcmp(failure, "") == 0 && strncmp(report.kernel, "linear_", 7) == 0);
    nib_text_free(failure);
    OK(nib_qtensor_destroy(q));
  }

  nib_quantize_desc s8 = SIZED(nib_quantize_desc);
  s8.scheme = "s8c";
  nib_qtensor* q = NULL;
  OK(nib_quantize(NULL, &vw, &s8, &q));
  nib_weight* weight = pack(q, "s8zr");
  int8_t x8[M * k];
  float x_scales[M];
  int32_t x_zeros[M], x_sums[M];
  const nib_view vx = nib_matrix(x, NIB_F32, M, k), v8 = nib_matrix(x8, NIB_S8, M, k), vs = nib_vector(x_scales, NIB_F32, M),
                 vz = nib_vector(x_zeros, NIB_S32, M), vu = nib_vector(x_sums, NIB_S32, M);
  nib_act_quantize_desc acts = SIZED(nib_act_quantize_desc);
  acts.scheme = "s8zr";
  acts.a = &vx, acts.codes = &v8, acts.scales = &vs, acts.zeros = &vz, acts.sums = &vu;
  OK(nib_quantize_activations(&acts, NULL));
  for (int m = 0; m < M; ++m) {
    int32_t sum = 0;
    for (int i = 0; i < k; ++i) {
      sum += x8[m * k + i];
      CHECK(fabsf((float)(x8[m * k + i] - x_zeros[m]) * x_scales[m] - x[m * k + i]) <= 0.51f * x_scales[m]);
    }
    CHECK(sum == x_sums[m]);
  }

  nib_linear_desc linear = SIZED(nib_linear_desc);
  linear.act_scheme = "s8zr";
  linear.m_max = M;
  nib_plan *by_floats = NULL, *by_codes = NULL;
  OK(nib_plan_linear(weight, &linear, NULL, &by_floats));
  linear.a_dtype = NIB_S8;
  OK(nib_plan_linear(weight, &linear, NULL, &by_codes));
  const nib_view df = nib_matrix(from_floats, NIB_F32, M, n), dc = nib_matrix(from_codes, NIB_F32, M, n);
  nib_operands operands = SIZED(nib_operands);
  operands.a = &vx, operands.d = &df;
  OK(execute(by_floats, weight, &operands));
  operands.a = &v8, operands.d = &dc, operands.a_scale = &vs, operands.a_zero = &vz;
  OK(execute(by_codes, weight, &operands));
  CHECK(memcmp(from_floats, from_codes, sizeof from_codes) == 0);
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < n; ++j) {
      double exact = 0;
      for (int i = 0; i < k; ++i) exact += (double)x[m * k + i] * w[j * k + i];
      CHECK(fabs(from_codes[m * n + j] - exact) < 0.15);
    }
  operands.a_scale = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "a_scale", execute(by_codes, weight, &operands));
  OK(nib_plan_destroy(by_codes));

  /* The same codes as u8. */
  uint8_t xu[M * k];
  int32_t u_zeros[M];
  for (int i = 0; i < M * k; ++i) xu[i] = (uint8_t)(x8[i] + 128);
  for (int m = 0; m < M; ++m) u_zeros[m] = x_zeros[m] + 128;
  const nib_view v_u8 = nib_matrix(xu, NIB_U8, M, k), vuz = nib_vector(u_zeros, NIB_S32, M);
  linear.a_dtype = NIB_U8;
  OK(nib_plan_linear(weight, &linear, NULL, &by_codes));
  memset(from_codes, 0, sizeof from_codes);
  operands.a = &v_u8, operands.a_scale = &vs, operands.a_zero = &vuz;
  OK(execute(by_codes, weight, &operands));
  CHECK(memcmp(from_floats, from_codes, sizeof from_codes) == 0);
  operands.a_scale = NULL;
  OK(nib_plan_destroy(by_floats));
  OK(nib_plan_destroy(by_codes));

  /* Float offsets: a token that is far from zero. */
  float x_offsets[M], far[M * k];
  for (int i = 0; i < M * k; ++i) far[i] = x[i] + (i < k ? 40.0f : 0.0f);
  const nib_view vo = nib_vector(x_offsets, NIB_F32, M), vf = nib_matrix(far, NIB_F32, M, k);
  acts.scheme = "s8or", acts.a = &vf, acts.zeros = &vo;
  OK(nib_quantize_activations(&acts, NULL));
  for (int i = 0; i < M * k; ++i)
    CHECK(fabsf((float)x8[i] * x_scales[i / k] + x_offsets[i / k] - far[i]) <= 0.51f * x_scales[i / k] + 1e-5f);
  linear.act_scheme = "s8or", linear.a_dtype = NIB_F32;
  OK(nib_plan_linear(weight, &linear, NULL, &by_floats));
  linear.a_dtype = NIB_S8;
  OK(nib_plan_linear(weight, &linear, NULL, &by_codes));
  operands.a = &vf, operands.d = &df, operands.a_scale = NULL;
  OK(execute(by_floats, weight, &operands));
  operands.a = &v8, operands.d = &dc, operands.a_scale = &vs;
  FAILS(NIB_INVALID_ARGUMENT, "a_zero must be f32", execute(by_codes, weight, &operands));
  operands.a_zero = &vo;
  OK(execute(by_codes, weight, &operands));
  CHECK(memcmp(from_floats, from_codes, sizeof from_codes) == 0);
  OK(nib_plan_destroy(by_floats));
  OK(nib_plan_destroy(by_codes));

  /* A known scale; FP8 in groups. */
  const float known = 1.0f / 64;
  nib_act_quantize_desc fixed = SIZED(nib_act_quantize_desc);
  fixed.scheme = "s8t";
  fixed.a = &vx, fixed.codes = &v8, fixed.static_scale = &known;
  OK(nib_quantize_activations(&fixed, NULL));
  for (int i = 0; i < M * k; ++i) CHECK(fabsf((float)x8[i] * known - x[i]) <= 0.5f * known);
  fixed.static_scale = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "known beforehand", nib_quantize_activations(&fixed, NULL));
  float group_scales[M * 2];
  const nib_view vg = nib_matrix(group_scales, NIB_F32, M, 2), ve = nib_matrix(x8, NIB_E4M3, M, k);
  nib_act_quantize_desc grouped = SIZED(nib_act_quantize_desc);
  grouped.scheme = "e4m3g32";
  grouped.a = &vx, grouped.codes = &ve, grouped.scales = &vg;
  OK(nib_quantize_activations(&grouped, NULL));
  for (int i = 0; i < M * 2; ++i) CHECK(group_scales[i] > 0 && group_scales[i] <= 1 / 448.0f);

  FAILS(NIB_INVALID_ARGUMENT, "no scheme of activations", (acts.scheme = "s8r_s8c", nib_quantize_activations(&acts, NULL)));
  FAILS(NIB_INVALID_ARGUMENT, "scheme is NULL", (acts.scheme = NULL, nib_quantize_activations(&acts, NULL)));
  FAILS(NIB_INVALID_ARGUMENT, "pass NULL for the stream", nib_quantize_activations(&grouped, &acts));
  OK(nib_weight_destroy(weight));
  OK(nib_qtensor_destroy(q));
}

/* Convolutions: 2 images of 8 channels, 7x6, through a 3x3 filter with distinct strides, paddings and dilations. */
enum { B = 2, C = 8, H = 7, W = 6, CO = 12, KH = 3, KW = 3, OH = 4, OW = 7, CONV_K = KH * KW * C };

static nib_conv_desc conv_desc(void) {
  nib_conv_desc desc = SIZED(nib_conv_desc);
  desc.batch_max = B;
  desc.height = H, desc.width = W;
  desc.stride_height = 2;
  desc.padding_top = 1, desc.padding_bottom = 2, desc.padding_left = 3, desc.padding_right = 2;
  desc.dilation_width = 2;
  return desc;
}

static size_t at(const nib_view* v, int b, int c, int h, int w) {
  return (size_t)(b * v->strides[0] + c * v->strides[1] + h * v->strides[2] + w * v->strides[3]);
}

/* One output; x(b, c, h, w) is element i of the image in memory, minus `zero`, times `scale`. w is [CO,KH,KW,C]. */
static double conv_value(const nib_view* x, int b, int n, int oh, int ow, const float* w, double zero, double scale) {
  double sum = 0;
  for (int kh = 0; kh < KH; ++kh)
    for (int kw = 0; kw < KW; ++kw)
      for (int c = 0; c < C; ++c) {
        const int h = oh * 2 - 1 + kh, col = ow - 3 + kw * 2;
        if (h < 0 || h >= H || col < 0 || col >= W) continue;
        const size_t i = at(x, b, c, h, col);
        const double value = x->dtype == NIB_S8 ? ((const int8_t*)x->data)[i] : (double)((const float*)x->data)[i];
        sum += (value - zero) * scale * w[((n * KH + kh) * KW + kw) * C + c];
      }
  return sum;
}

/* Every output of a convolution against the oracle, and refusals of verification. */
static void test_verify_conv(const nib_qtensor* q) {
  nib_conv_desc conv = conv_desc();
  conv.output = NIB_NHWC;
  nib_verify_desc desc = SIZED(nib_verify_desc);
  desc.conv = &conv;
  nib_verify_report report = SIZED(nib_verify_report);
  char* failure = NULL;
  OK(nib_verify(q, &desc, &report, &failure));
  CHECK(report.passed && report.checked == B * CO * OH * OW && strncmp(report.kernel, "conv_", 5) == 0 &&
        strcmp(failure, "") == 0);
  nib_text_free(failure);
  const nib_linear_desc linear = SIZED(nib_linear_desc);
  FAILS(NIB_INVALID_ARGUMENT, "leave one NULL", (desc.linear = &linear, nib_verify(q, &desc, &report, NULL)));
  FAILS(NIB_INVALID_ARGUMENT, "is negative", (desc.linear = NULL, desc.sample_columns = -1, nib_verify(q, &desc, &report, NULL)));
  FAILS(NIB_INVALID_ARGUMENT, "does not fit into the padded image",
        (desc.sample_columns = 0, conv.height = conv.width = 1, conv.padding_top = conv.padding_bottom = 0,
         nib_verify(q, &desc, &report, NULL)));
}

static void test_conv(void) {
  float w[CO * CONV_K], x[B * C * H * W], d[B * CO * OH * OW], rows[CO * CONV_K];
  int8_t x8[B * C * H * W];
  fill(w, CO * CONV_K, 11);
  fill(x, B * C * H * W, 12);
  for (int i = 0; i < B * C * H * W; ++i) x8[i] = (int8_t)(x[i] * 100);
  const nib_view kernel = {w, NIB_F32, 4, {CO, C, KH, KW}, {CONV_K, KH * KW, KW, 1}};
  nib_quantize_desc how = SIZED(nib_quantize_desc);
  how.scheme = "u4zg8";
  nib_qtensor *q = NULL, *again = NULL;
  OK(nib_quantize_conv(NULL, &kernel, &how, &q));
  nib_qtensor_desc got = SIZED(nib_qtensor_desc);
  OK(nib_qtensor_get(q, &got));
  CHECK(got.n == CO && got.k == CONV_K && got.filter_height == KH && got.filter_width == KW);
  OK(nib_qtensor_create(&got, &again));
  OK(nib_qtensor_destroy(q));
  test_verify_conv(again);
  nib_weight* weight = pack(again, NULL);
  OK(nib_qtensor_destroy(again));
  nib_weight_info info = SIZED(nib_weight_info);
  OK(nib_weight_get(weight, &info));
  CHECK(info.filter_height == KH && info.filter_width == KW);
  dequantize(weight, rows, CO, CONV_K);
  for (int n = 0; n < CO; ++n)
    for (int c = 0; c < C; ++c)
      for (int i = 0; i < KH * KW; ++i) CHECK(fabsf(rows[(n * KH * KW + i) * C + c] - w[(n * C + c) * KH * KW + i]) < 0.08f);

  /* f32, every pair of layouts. */
  nib_plan *plan = NULL, *none = NULL;
  nib_operands operands = SIZED(nib_operands);
  for (int i = 0; i < 4; ++i) {
    nib_conv_desc desc = conv_desc();
    nib_epilogue relu = SIZED(nib_epilogue);
    relu.activation = NIB_ACTIVATION_RELU;
    desc.epilogue = i == 3 ? &relu : NULL;
    desc.input = i % 2, desc.output = i / 2;
    OK(nib_plan_conv(weight, &desc, NULL, &plan));
    const nib_view vx = nib_images(x, NIB_F32, desc.input, B, C, H, W), vd = nib_images(d, NIB_F32, desc.output, B, CO, OH, OW);
    operands.a = &vx, operands.d = &vd;
    OK(execute(plan, weight, &operands));
    for (int j = 0; j < B * CO * OH * OW; ++j) {
      const int b = j / (CO * OH * OW), n = j / (OH * OW) % CO, oh = j / OW % OH, ow = j % OW;
      double exact = conv_value(&vx, b, n, oh, ow, rows, 0, 1);
      if (i == 3 && exact < 0) exact = 0;
      CHECK(fabs(d[at(&vd, b, n, oh, ow)] - exact) < 1e-4);
    }
    const nib_view swapped = nib_images(x, NIB_F32, 1 - desc.input, B, C, H, W), small = nib_images(d, NIB_F32, 0, B, CO, OH, 6);
    operands.a = &swapped;
    FAILS(NIB_INVALID_ARGUMENT, i % 2 ? "not nhwc" : "not nchw", execute(plan, weight, &operands));
    operands.a = &vx, operands.d = &small;
    FAILS(NIB_INVALID_ARGUMENT, "D must be [2,12,4,7]", execute(plan, weight, &operands));
    OK(nib_plan_destroy(plan));
  }
  OK(nib_weight_destroy(weight));

  /* 8-bit codes on both sides, images of codes with a zero point, which is the value of padding. */
  const float a_scale = 1.0f / 64;
  const int32_t a_zero = 9;
  how.scheme = "s8c";
  OK(nib_quantize_conv(NULL, &kernel, &how, &q));
  weight = pack(q, "s8zt");
  OK(nib_qtensor_destroy(q));
  dequantize(weight, rows, CO, CONV_K);
  const nib_view scale = nib_vector(&a_scale, NIB_F32, 1), zero = nib_vector(&a_zero, NIB_S32, 1);
  for (int layout = NIB_NCHW; layout <= NIB_NHWC; ++layout) {
    nib_conv_desc desc = conv_desc();
    desc.a_dtype = NIB_S8;
    desc.act_scheme = "s8zt";
    desc.input = desc.output = layout;
    OK(nib_plan_conv(weight, &desc, NULL, &plan));
    const nib_view vx = nib_images(x8, NIB_S8, layout, B, C, H, W), vd = nib_images(d, NIB_F32, layout, B, CO, OH, OW);
    nib_operands with_scales = SIZED(nib_operands);
    with_scales.a = &vx, with_scales.d = &vd, with_scales.a_scale = &scale, with_scales.a_zero = &zero;
    OK(execute(plan, weight, &with_scales));
    for (int j = 0; j < B * CO * OH * OW; ++j) {
      const int b = j / (CO * OH * OW), n = j / (OH * OW) % CO, oh = j / OW % OH, ow = j % OW;
      CHECK(fabs(d[at(&vd, b, n, oh, ow)] - conv_value(&vx, b, n, oh, ow, rows, a_zero, a_scale)) < 1e-4);
    }
    const int32_t no_code = 128;
    const nib_view far_zero = nib_vector(&no_code, NIB_S32, 1);
    with_scales.a_zero = &far_zero;
    FAILS(NIB_INVALID_ARGUMENT, "a_zero=128 is outside [-128, 127]", execute(plan, weight, &with_scales));
    OK(nib_plan_destroy(plan));
  }

  nib_conv_desc desc;
#define BAD(status, part, change) FAILS(status, part, (desc = conv_desc(), change, nib_plan_conv(weight, &desc, NULL, &none)))
  BAD(NIB_INVALID_ARGUMENT, "an output of 0x3: the filter does not fit",
      (desc.height = 1, desc.padding_bottom = 0, desc.width = 2));
  BAD(NIB_INVALID_ARGUMENT, "sizes must be at least 1", desc.height = 0);
  BAD(NIB_INVALID_ARGUMENT, "at least 1", desc.stride_width = -1);
  BAD(NIB_INVALID_ARGUMENT, "not be negative", desc.padding_left = -1);
  BAD(NIB_INVALID_ARGUMENT, "groups must divide", desc.groups = -2);
  BAD(NIB_INVALID_ARGUMENT, "groups must divide", desc.groups = 5);
  BAD(NIB_INVALID_ARGUMENT, "a size of", desc.width = INT64_MAX);
  BAD(NIB_INVALID_ARGUMENT, "a size of", desc.groups = INT64_MAX);
  BAD(NIB_INVALID_ARGUMENT, "batch_max=-1", desc.batch_max = -1);
  BAD(NIB_INVALID_ARGUMENT, "nib_conv_desc.output is 2", desc.output = 2);
  BAD(NIB_UNSUPPORTED, "per tensor", (desc.a_dtype = NIB_S8, desc.act_scheme = "s8r"));
  BAD(NIB_INVALID_ARGUMENT, "nib_conv_desc.accumulation is 2, neither NIB_FAST nor NIB_PRECISE", desc.accumulation = 2);
  BAD(NIB_INVALID_ARGUMENT, "nib_conv_desc.struct_size is 0", desc.struct_size = 0);
  BAD(NIB_INVALID_ARGUMENT, "struct_size", desc.struct_size -= 4);
  struct {
    nib_conv_desc known;
    uint64_t news;
  } later = {conv_desc(), 1};
  later.known.struct_size = sizeof later;
  FAILS(NIB_UNSUPPORTED, "does not know", nib_plan_conv(weight, &later.known, NULL, &none));
  nib_conv_desc earlier = conv_desc();
  earlier.struct_size = offsetof(nib_conv_desc, input);
  earlier.input = 7; /* beyond its end */
  OK(nib_plan_conv(weight, &earlier, NULL, &plan));
  OK(nib_plan_destroy(plan));
#undef BAD
  FAILS(NIB_INVALID_ARGUMENT, "was packed for a linear layer", nib_plan_conv(weight, NULL, NULL, &none));
  const nib_conv_desc images = conv_desc();
  const nib_pack_desc for_images = {.struct_size = sizeof for_images, .conv = &images};
  nib_weight* filters = NULL;
  OK(nib_unpack(weight, &again));
  OK(nib_pack(again, &for_images, &filters));
  OK(nib_qtensor_destroy(again));
  OK(nib_plan_conv(filters, NULL, NULL, &plan)); /* for the images that it was packed for */
  OK(nib_plan_destroy(plan));
  FAILS(NIB_INVALID_ARGUMENT, "was packed for a convolution", nib_plan_linear(filters, NULL, NULL, &none));
  OK(nib_weight_destroy(filters));
  FAILS(NIB_INVALID_ARGUMENT, "got rank 2",
        (got = (nib_qtensor_desc)SIZED(nib_qtensor_desc),
         nib_quantize_conv(NULL, &(nib_view){w, NIB_F32, 2, {CO, C}, {C, 1}}, &how, &again)));
  CHECK(none == NULL);
  OK(nib_weight_destroy(weight));
}

static void watch(void* user, uint64_t done, uint64_t total, const char* what) {
  CHECK(done <= total && what != NULL);
  ++*(int*)user;
}

/* A golden checkpoint against the values an independent program computed. */
static void test_checkpoint(const char* golden, const char* scratch) {
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

/* Descriptions of matrices that contradict themselves. */
static void test_bad_qtensors(void) {
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
static void test_bad_runs(void) {
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

/* 7 tokens through 2 of 4 experts each: 96 channels, 2 × 32 of gate_up, 40. */
enum { EXPERTS = 4, TOKENS = 7, TOP_K = 2, HIDDEN = 32, ROWS = TOKENS * TOP_K };
static nib_qtensor* gate_ups[EXPERTS];
static nib_qtensor* downs[EXPERTS];

static nib_qtensor* random_matrix(int64_t n, int64_t k, unsigned seed) {
  static float w[2 * HIDDEN * K];
  fill(w, (size_t)(n * k), seed);
  const nib_view view = nib_matrix(w, NIB_F32, n, k);
  nib_quantize_desc how = SIZED(nib_quantize_desc);
  how.scheme = "u4b8g32";
  nib_qtensor* q = NULL;
  OK(nib_quantize(NULL, &view, &how, &q));
  return q;
}

/* D of rows through expert e, by the linear plan of its weight. */
static void run_expert(const nib_experts* experts, size_t e, const float* x, int64_t rows, int64_t k, float* d, int64_t columns) {
  nib_weight* weight = NULL;
  nib_plan* plan = NULL;
  OK(nib_experts_weight(experts, e, &weight));
  OK(nib_plan_linear(weight, NULL, NULL, &plan));
  const nib_view va = nib_matrix(x, NIB_F32, rows, k), vd = nib_matrix(d, NIB_F32, rows, columns);
  nib_operands operands = SIZED(nib_operands);
  operands.a = &va, operands.d = &vd;
  OK(execute(plan, weight, &operands));
  OK(nib_plan_destroy(plan));
  OK(nib_weight_destroy(weight));
}

/* Scores are exp(logit) over their sum; the best two, and their shares of both. */
static void test_routing(const float* logits, int32_t* ids, float* shares) {
  const nib_view vl = nib_matrix(logits, NIB_F32, TOKENS, EXPERTS), vi = nib_matrix(ids, NIB_S32, TOKENS, TOP_K),
                 vw = nib_matrix(shares, NIB_F32, TOKENS, TOP_K);
  nib_route_desc routing = SIZED(nib_route_desc);
  routing.logits = &vl, routing.ids = &vi, routing.weights = &vw;
  routing.top_k = TOP_K;
  OK(nib_route(&routing));
  for (int t = 0; t < TOKENS; ++t) {
    const float* l = logits + t * EXPERTS;
    const int32_t first = ids[t * TOP_K], second = ids[t * TOP_K + 1];
    CHECK(first >= 0 && first < EXPERTS && second >= 0 && second < EXPERTS && first != second);
    for (int e = 0; e < EXPERTS; ++e) CHECK(e == first || l[e] <= l[first]);
    for (int e = 0; e < EXPERTS; ++e) CHECK(e == first || e == second || l[e] <= l[second]);
    CHECK(fabs(shares[t * TOP_K] - 1 / (1 + exp(l[second] - l[first]))) < 1e-6);
    CHECK(fabs(shares[t * TOP_K] + shares[t * TOP_K + 1] - 1) < 1e-6);
  }

  /* A bias chooses and does not weigh; scores of a sigmoid that stay as they are, doubled. */
  const float bias[EXPERTS] = {0, 8, 0, 4};
  const nib_view vb = nib_vector(bias, NIB_F32, EXPERTS);
  int32_t other_ids[ROWS];
  float other[ROWS];
  const nib_view oi = nib_matrix(other_ids, NIB_S32, TOKENS, TOP_K), ow = nib_matrix(other, NIB_F32, TOKENS, TOP_K);
  routing.ids = &oi, routing.weights = &ow, routing.bias = &vb;
  routing.score = NIB_ROUTE_SIGMOID, routing.unnormalized = 1, routing.scale = 2;
  OK(nib_route(&routing));
  for (int i = 0; i < ROWS; ++i) {
    CHECK(other_ids[i] == (i % TOP_K == 0 ? 1 : 3));
    CHECK(fabs(other[i] - 2 / (1 + exp(-logits[i / TOP_K * EXPERTS + other_ids[i]]))) < 1e-6);
  }
  routing.groups = 2; /* experts 0 and 1, of which the second has the largest bias */
  OK(nib_route(&routing));
  for (int i = 0; i < ROWS; ++i) CHECK(other_ids[i] == (i % TOP_K == 0 ? 1 : 0));

  FAILS(NIB_INVALID_ARGUMENT, "nib_route_desc is NULL", nib_route(NULL));
  routing.groups = 3;
  FAILS(NIB_INVALID_ARGUMENT, "groups=3", nib_route(&routing));
  routing.groups = 0, routing.top_k = 5;
  FAILS(NIB_INVALID_ARGUMENT, "top_k=5", nib_route(&routing));
  routing.top_k = TOP_K, routing.score = 7;
  FAILS(NIB_INVALID_ARGUMENT, "score is 7", nib_route(&routing));
  routing.score = NIB_ROUTE_SOFTMAX, routing.ids = &ow;
  FAILS(NIB_INVALID_ARGUMENT, "ids must be s32", nib_route(&routing));
  routing.ids = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "ids must be s32", nib_route(&routing));
  routing.logits = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "logits must be", nib_route(&routing));
  routing.reserved = 1;
  FAILS(NIB_UNSUPPORTED, "reserved", nib_route(&routing));
}

/* The three forms of rows give the bits of each expert's linear plan. */
static void test_grouped(const nib_experts* experts, const nib_context* context) {
  static float x[ROWS * K], reversed[ROWS * K], padded[EXPERTS * ROWS * K];
  static float d[ROWS * HIDDEN], wanted[ROWS * HIDDEN], padded_d[EXPERTS * ROWS * HIDDEN];
  const int32_t offsets[EXPERTS + 1] = {0, 5, 5, 6, ROWS};
  int32_t counts[EXPERTS], order[ROWS];
  fill(x, ROWS * K, 41);
  for (int i = 0; i < ROWS; ++i) {
    order[i] = ROWS - 1 - i;
    memcpy(reversed + order[i] * K, x + i * K, K * sizeof *x);
  }
  for (int e = 0; e < EXPERTS; ++e) {
    const int32_t first = offsets[e];
    counts[e] = offsets[e + 1] - first;
    memcpy(padded + e * ROWS * K, x + first * K, (size_t)counts[e] * K * sizeof *x);
    if (counts[e] != 0) run_expert(experts, (size_t)e, x + first * K, counts[e], K, wanted + first * HIDDEN, HIDDEN);
  }

  nib_grouped_plan *plan = NULL, *none = NULL;
  OK(nib_plan_grouped(experts, NULL, NULL, &plan)); /* for what the experts were packed for */
  char* text = NULL;
  OK(nib_grouped_plan_explain(plan, &text));
  CHECK(strncmp(text, "M = 1", 5) == 0);
  nib_text_free(text);
  size_t bytes = 0;
  OK(nib_grouped_plan_workspace_size(plan, &bytes));
  void* workspace = malloc(bytes);
  const nib_view vx = nib_matrix(x, NIB_F32, ROWS, K), vr = nib_matrix(reversed, NIB_F32, ROWS, K),
                 vd = nib_matrix(d, NIB_F32, ROWS, HIDDEN), vo = nib_vector(offsets, NIB_S32, EXPERTS + 1),
                 vc = nib_vector(counts, NIB_S32, EXPERTS), vi = nib_vector(order, NIB_S32, ROWS),
                 vp = {padded, NIB_F32, 3, {EXPERTS, ROWS, K}, {ROWS * K, K, 1}},
                 vq = {padded_d, NIB_F32, 3, {EXPERTS, ROWS, HIDDEN}, {ROWS * HIDDEN, HIDDEN, 1}};
  nib_operands operands = SIZED(nib_operands);
  operands.context = context, operands.a = &vx, operands.d = &vd;
  nib_expert_rows sorted = SIZED(nib_expert_rows), indexed = SIZED(nib_expert_rows), counted = SIZED(nib_expert_rows);
  sorted.offsets = &vo;
  OK(nib_grouped_plan_run(plan, experts, &sorted, &operands, workspace, bytes, NULL));
  CHECK(memcmp(d, wanted, sizeof d) == 0);
  memset(d, 0xff, sizeof d);
  indexed.offsets = &vo, indexed.rows = &vi;
  operands.a = &vr;
  OK(nib_grouped_plan_run(plan, experts, &indexed, &operands, workspace, bytes, NULL));
  CHECK(memcmp(d, wanted, sizeof d) == 0);
  counted.counts = &vc;
  operands.a = &vp, operands.d = &vq;
  OK(nib_grouped_plan_run(plan, experts, &counted, &operands, workspace, bytes, NULL));
  for (int e = 0; e < EXPERTS; ++e)
    CHECK(memcmp(padded_d + e * ROWS * HIDDEN, wanted + offsets[e] * HIDDEN, (size_t)counts[e] * HIDDEN * sizeof *d) == 0);

  memset(d, 0, sizeof d);
  operands.a = &vx, operands.d = &vd;
  FAILS(NIB_INVALID_ARGUMENT, "nib_grouped_plan is NULL",
        nib_grouped_plan_run(NULL, experts, &sorted, &operands, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_experts is NULL",
        nib_grouped_plan_run(plan, NULL, &sorted, &operands, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_expert_rows is NULL",
        nib_grouped_plan_run(plan, experts, NULL, &operands, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_operands is NULL", nib_grouped_plan_run(plan, experts, &sorted, NULL, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "workspace", nib_grouped_plan_run(plan, experts, &sorted, &operands, NULL, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "workspace", nib_grouped_plan_run(plan, experts, &sorted, &operands, workspace, bytes - 1, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "NULL for the stream",
        nib_grouped_plan_run(plan, experts, &sorted, &operands, workspace, bytes, &bytes));
  const nib_expert_rows neither = SIZED(nib_expert_rows);
  FAILS(NIB_INVALID_ARGUMENT, "takes offsets", nib_grouped_plan_run(plan, experts, &neither, &operands, workspace, bytes, NULL));
  order[3] = ROWS;
  FAILS(NIB_INVALID_ARGUMENT, "rows[3]=14", nib_grouped_plan_run(plan, experts, &indexed, &operands, workspace, bytes, NULL));
  for (int i = 0; i < ROWS * HIDDEN; ++i) CHECK(d[i] == 0);

  nib_epilogue epilogue = SIZED(nib_epilogue);
  nib_linear_desc linear = SIZED(nib_linear_desc);
  linear.epilogue = &epilogue;
  epilogue.activation = NIB_ACTIVATION_SILU, epilogue.glu = 1, epilogue.operands = NIB_COL_SCALE;
  FAILS(NIB_UNSUPPORTED, "col_scale", nib_plan_grouped(experts, &linear, NULL, &none));
  FAILS(NIB_INVALID_ARGUMENT, "nib_experts is NULL", nib_plan_grouped(NULL, NULL, NULL, &none));
  epilogue.operands = NIB_RESIDUAL; /* with counts it has rows of all matrices */
  linear.m_max = ROWS;
  nib_grouped_plan* added = NULL;
  OK(nib_plan_grouped(experts, &linear, NULL, &added));
  operands.a = &vp, operands.d = &vq, operands.residual = &vd;
  FAILS(NIB_INVALID_ARGUMENT, "residual must be [56,32]",
        nib_grouped_plan_run(added, experts, &counted, &operands, workspace, bytes, NULL));
  OK(nib_grouped_plan_destroy(added));
  FAILS(NIB_INVALID_ARGUMENT, "place for the size", nib_grouped_plan_workspace_size(plan, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_grouped_plan is NULL", nib_grouped_plan_explain(NULL, &text));
  CHECK(none == NULL);
  free(workspace);
  OK(nib_grouped_plan_destroy(plan));
  OK(nib_grouped_plan_destroy(NULL));
}

/* A checkpoint of floats whose experts are stored together: gate_up_proj [EXPERTS, 2 * HIDDEN, K] and down_proj [EXPERTS, K, HIDDEN]. */
static void write_experts(const char* path) {
  static float gate_up[EXPERTS * 2 * HIDDEN * K], down[EXPERTS * K * HIDDEN];
  fill(gate_up, EXPERTS * 2 * HIDDEN * K, 71);
  fill(down, EXPERTS * K * HIDDEN, 72);
  char header[512];
  const int length =
      snprintf(header, sizeof header,
               "{\"h.0.experts.gate_up_proj\":{\"dtype\":\"F32\",\"shape\":[%d,%d,%d],\"data_offsets\":[0,%zu]},"
               "\"h.0.experts.down_proj\":{\"dtype\":\"F32\",\"shape\":[%d,%d,%d],\"data_offsets\":[%zu,%zu]}}",
               EXPERTS, 2 * HIDDEN, K, sizeof gate_up, EXPERTS, K, HIDDEN, sizeof gate_up, sizeof gate_up + sizeof down);
  const uint64_t size = (uint64_t)length;
  FILE* file = fopen(path, "wb");
  CHECK(file != NULL && fwrite(&size, 8, 1, file) == 1 && fwrite(header, size, 1, file) == 1);
  CHECK(fwrite(gate_up, sizeof gate_up, 1, file) == 1 && fwrite(down, sizeof down, 1, file) == 1 && fclose(file) == 0);
}

/* The experts of a checkpoint, against those that are read one by one. */
static void test_expert_layers(const char* scratch) {
  char path[512];
  snprintf(path, sizeof path, "%s/experts.safetensors", scratch);
  write_experts(path);
  nib_checkpoint* checkpoint = NULL;
  OK(nib_checkpoint_open(path, &checkpoint));
  char *text = NULL, *notes = NULL;
  OK(nib_checkpoint_expert_layers(checkpoint, &text));
  CHECK(strcmp(text, "h.0.experts\t4\n") == 0);
  nib_text_free(text);

  nib_epilogue glu = SIZED(nib_epilogue);
  glu.activation = NIB_ACTIVATION_QUICK_GELU, glu.glu = 1, glu.glu_limit = 7, glu.glu_offset = 1;
  nib_linear_desc first = SIZED(nib_linear_desc), second = SIZED(nib_linear_desc);
  first.epilogue = &glu, first.m_max = second.m_max = 4;
  nib_expert_layer_desc desc = SIZED(nib_expert_layer_desc);
  desc.gate_up = &first, desc.down = &second;
  nib_experts *gate_up = NULL, *down = NULL;
  const char* const layer = "h.0.experts";
  OK(nib_pack_expert_layer(checkpoint, layer, &desc, &gate_up, &down, &notes));
  CHECK(strcmp(notes, "") == 0);
  nib_text_free(notes);
  nib_experts_info info = SIZED(nib_experts_info), of_down = SIZED(nib_experts_info);
  OK(nib_experts_get(gate_up, &info));
  OK(nib_experts_get(down, &of_down));
  CHECK(info.count == EXPERTS && info.n == 2 * HIDDEN && info.k == K && info.backend == NIB_CPU);
  CHECK(of_down.count == EXPERTS && of_down.n == K && of_down.k == HIDDEN &&
        of_down.bytes >= sizeof(float) * EXPERTS * K * HIDDEN);
  for (size_t e = 0; e < EXPERTS; ++e) {
    char name[64];
    size_t module = 0;
    nib_weight* weight = NULL;
    nib_qtensor *q = NULL, *unpacked = NULL;
    snprintf(name, sizeof name, "%s.%d.down_proj", layer, (int)e);
    OK(nib_checkpoint_find_module(checkpoint, name, &module));
    OK(nib_checkpoint_read(checkpoint, module, &q, NULL));
    OK(nib_experts_weight(down, e, &weight));
    OK(nib_unpack(weight, &unpacked));
    nib_qtensor_desc given = SIZED(nib_qtensor_desc), got = SIZED(nib_qtensor_desc);
    OK(nib_qtensor_get(q, &given));
    OK(nib_qtensor_get(unpacked, &got));
    CHECK(memcmp(got.codes.data, given.codes.data, sizeof(float) * K * HIDDEN) == 0);
    OK(nib_qtensor_destroy(unpacked));
    OK(nib_qtensor_destroy(q));
    OK(nib_weight_destroy(weight));
  }
  nib_moe_plan* plan = NULL;
  const nib_moe_desc moe = {.struct_size = sizeof moe, .tokens_max = 4, .top_k = 2};
  OK(nib_plan_moe(gate_up, down, &moe, NULL, &plan));
  OK(nib_moe_plan_destroy(plan));
  OK(nib_experts_destroy(gate_up));
  OK(nib_experts_destroy(down));

  nib_experts* none = NULL;
  FAILS(NIB_NOT_FOUND, "it has h.0.experts", nib_pack_expert_layer(checkpoint, "h.1", &desc, &none, &down, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "name of a layer", nib_pack_expert_layer(checkpoint, NULL, &desc, &none, &down, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_expert_layer_desc is NULL",
        nib_pack_expert_layer(checkpoint, layer, NULL, &none, &down, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "handle of down", nib_pack_expert_layer(checkpoint, layer, &desc, &none, NULL, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_checkpoint is NULL", nib_pack_expert_layer(NULL, layer, &desc, &none, &down, NULL));
  desc.gate_up = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "gate_up is NULL", nib_pack_expert_layer(checkpoint, layer, &desc, &none, &down, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_experts is NULL", nib_experts_get(NULL, &info));
  CHECK(none == NULL);
  OK(nib_checkpoint_destroy(checkpoint));
}

static void test_experts(void) {
  for (unsigned e = 0; e < EXPERTS; ++e) {
    gate_ups[e] = random_matrix(2 * HIDDEN, K, 50 + e);
    downs[e] = random_matrix(N, HIDDEN, 60 + e);
  }
  nib_epilogue glu = SIZED(nib_epilogue);
  glu.activation = NIB_ACTIVATION_SILU, glu.glu = 1;
  nib_linear_desc first = SIZED(nib_linear_desc), second = SIZED(nib_linear_desc);
  first.epilogue = &glu, first.m_max = second.m_max = ROWS;
  nib_pack_desc packing = SIZED(nib_pack_desc);
  nib_experts *gate_up = NULL, *down = NULL, *none = NULL;
  packing.linear = &first;
  OK(nib_pack_experts((const nib_qtensor* const*)gate_ups, EXPERTS, &packing, &gate_up));
  packing.linear = &second;
  OK(nib_pack_experts((const nib_qtensor* const*)downs, EXPERTS, &packing, &down));

  nib_weight* weight = NULL;
  nib_qtensor* unpacked = NULL;
  OK(nib_experts_weight(down, 2, &weight));
  OK(nib_unpack(weight, &unpacked));
  nib_qtensor_desc given = SIZED(nib_qtensor_desc), got = SIZED(nib_qtensor_desc);
  OK(nib_qtensor_get(downs[2], &given));
  OK(nib_qtensor_get(unpacked, &got));
  CHECK(memcmp(got.codes.data, given.codes.data, N * HIDDEN) == 0);
  OK(nib_qtensor_destroy(unpacked));
  OK(nib_weight_destroy(weight));

  nib_context* context = NULL;
  nib_context_desc threads = SIZED(nib_context_desc);
  threads.threads = 3;
  OK(nib_context_create(&threads, &context));
  test_grouped(gate_up, context);

  static float x[TOKENS * K], logits[TOKENS * EXPERTS], shares[ROWS], residual[TOKENS * N], d[TOKENS * N];
  static int32_t ids[ROWS];
  fill(x, TOKENS * K, 42);
  fill(logits, TOKENS * EXPERTS, 43);
  fill(residual, TOKENS * N, 44);
  test_routing(logits, ids, shares);
  ids[5] = -1; /* a token may have fewer experts */

  nib_moe_desc desc = SIZED(nib_moe_desc);
  desc.tokens_max = TOKENS, desc.top_k = TOP_K, desc.residual = 1;
  nib_moe_plan *plan = NULL, *failed = NULL;
  OK(nib_plan_moe(gate_up, down, &desc, NULL, &plan));
  char* text = NULL;
  OK(nib_moe_plan_explain(plan, &text));
  CHECK(strncmp(text, "gate_up\nM = 1", 13) == 0 && strstr(text, "\ndown\nM = 1") != NULL);
  nib_text_free(text);
  size_t bytes = 0;
  OK(nib_moe_plan_workspace_size(plan, &bytes));
  void* workspace = malloc(bytes);
  const nib_view vx = nib_matrix(x, NIB_F32, TOKENS, K), vd = nib_matrix(d, NIB_F32, TOKENS, N),
                 vi = nib_matrix(ids, NIB_S32, TOKENS, TOP_K), vw = nib_matrix(shares, NIB_F32, TOKENS, TOP_K),
                 vr = nib_matrix(residual, NIB_F32, TOKENS, N);
  nib_moe_operands operands = SIZED(nib_moe_operands);
  operands.context = context, operands.x = &vx, operands.d = &vd, operands.ids = &vi, operands.weights = &vw;
  operands.residual = &vr;
  OK(nib_moe_plan_run(plan, gate_up, down, &operands, workspace, bytes, NULL));
  for (int t = 0; t < TOKENS; ++t) {
    float wanted[N], hidden[HIDDEN], result[N];
    memcpy(wanted, residual + t * N, sizeof wanted);
    for (int j = 0; j < TOP_K; ++j) {
      const int32_t id = ids[t * TOP_K + j];
      if (id < 0) continue;
      run_expert(gate_up, (size_t)id, x + t * K, 1, K, hidden, HIDDEN);
      run_expert(down, (size_t)id, hidden, 1, HIDDEN, result, N);
      for (int n = 0; n < N; ++n) wanted[n] += shares[t * TOP_K + j] * result[n];
    }
    for (int n = 0; n < N; ++n) CHECK(fabs(d[t * N + n] - wanted[n]) <= 1e-4 * (1 + fabs(wanted[n])));
  }

  /* The same layer of weights one by one, for descriptors that say what they were packed for. */
  nib_weight* weights[EXPERTS];
  nib_experts* again = NULL;
  nib_moe_plan* other = NULL;
  for (size_t e = 0; e < EXPERTS; ++e) OK(nib_experts_weight(down, e, &weights[e]));
  OK(nib_experts_of((const nib_weight* const*)weights, EXPERTS, &again));
  for (int e = 0; e < EXPERTS; ++e) OK(nib_weight_destroy(weights[e]));
  desc.gate_up = &first, desc.down = &second;
  OK(nib_plan_moe(gate_up, again, &desc, NULL, &other));
  static float same[TOKENS * N];
  const nib_view vsame = nib_matrix(same, NIB_F32, TOKENS, N);
  operands.d = &vsame;
  OK(nib_moe_plan_run(other, gate_up, again, &operands, workspace, bytes, NULL));
  CHECK(memcmp(same, d, sizeof d) == 0);
  OK(nib_moe_plan_destroy(other));
  OK(nib_experts_destroy(again));
  operands.d = &vd;
  second.a_dtype = NIB_F16;
  FAILS(NIB_INVALID_ARGUMENT, "writes f32, down takes f16", nib_plan_moe(gate_up, down, &desc, NULL, &failed));
  second.a_dtype = NIB_F32, desc.gate_up = desc.down = NULL;
#ifdef COUNT_ALLOCATIONS
  const long before = atomic_load(&allocations);
  OK(nib_moe_plan_run(plan, gate_up, down, &operands, workspace, bytes, NULL));
  CHECK(atomic_load(&allocations) == before);
#endif

  memset(d, 0, sizeof d);
  FAILS(NIB_INVALID_ARGUMENT, "nib_moe_plan is NULL", nib_moe_plan_run(NULL, gate_up, down, &operands, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_experts is NULL", nib_moe_plan_run(plan, gate_up, NULL, &operands, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_moe_operands is NULL", nib_moe_plan_run(plan, gate_up, down, NULL, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "the plan is for 4 experts",
        nib_moe_plan_run(plan, down, gate_up, &operands, workspace, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "workspace", nib_moe_plan_run(plan, gate_up, down, &operands, NULL, bytes, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "workspace", nib_moe_plan_run(plan, gate_up, down, &operands, workspace, bytes - 1, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "NULL for the stream", nib_moe_plan_run(plan, gate_up, down, &operands, workspace, bytes, &bytes));
  operands.residual = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "residual", nib_moe_plan_run(plan, gate_up, down, &operands, workspace, bytes, NULL));
  operands.residual = &vr, operands.weights = &vi;
  FAILS(NIB_INVALID_ARGUMENT, "weights must be f32", nib_moe_plan_run(plan, gate_up, down, &operands, workspace, bytes, NULL));
  operands.weights = &vw, ids[4] = EXPERTS;
  FAILS(NIB_INVALID_ARGUMENT, "ids[2,0]=4", nib_moe_plan_run(plan, gate_up, down, &operands, workspace, bytes, NULL));
  for (int i = 0; i < TOKENS * N; ++i) CHECK(d[i] == 0);

  desc.top_k = EXPERTS + 1;
  FAILS(NIB_INVALID_ARGUMENT, "top_k=5, of 4 experts", nib_plan_moe(gate_up, down, &desc, NULL, &failed));
  desc.top_k = 0, desc.out = NIB_S8;
  FAILS(NIB_UNSUPPORTED, "s8", nib_plan_moe(gate_up, down, &desc, NULL, &failed));
  FAILS(NIB_INVALID_ARGUMENT, "write 40 channels", nib_plan_moe(down, down, NULL, NULL, &failed));
  FAILS(NIB_INVALID_ARGUMENT, "nib_experts is NULL", nib_plan_moe(gate_up, NULL, NULL, NULL, &failed));
  FAILS(NIB_INVALID_ARGUMENT, "place for the size", nib_moe_plan_workspace_size(plan, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "nib_moe_plan is NULL", nib_moe_plan_explain(NULL, &text));
  CHECK(failed == NULL);

  FAILS(NIB_INVALID_ARGUMENT, "experts=0", nib_pack_experts(NULL, 0, NULL, &none));
  FAILS(NIB_INVALID_ARGUMENT, "array of experts", nib_pack_experts(NULL, 1, NULL, &none));
  const nib_qtensor* const mixed[] = {downs[0], gate_ups[0]};
  const nib_qtensor* const missing[] = {downs[0], NULL};
  FAILS(NIB_INVALID_ARGUMENT, "experts 0 and 1 differ", nib_pack_experts(mixed, 2, NULL, &none));
  FAILS(NIB_INVALID_ARGUMENT, "expert 1: the nib_qtensor is NULL", nib_pack_experts(missing, 2, NULL, &none));
  const nib_weight* const absent[] = {NULL};
  FAILS(NIB_INVALID_ARGUMENT, "experts=0", nib_experts_of(NULL, 0, &none));
  FAILS(NIB_INVALID_ARGUMENT, "array of weights", nib_experts_of(NULL, 1, &none));
  FAILS(NIB_INVALID_ARGUMENT, "nib_weight is NULL", nib_experts_of(absent, 1, &none));
  const nib_conv_desc conv = SIZED(nib_conv_desc);
  packing.conv = &conv;
  FAILS(NIB_UNSUPPORTED, "experts are linear layers", nib_pack_experts(mixed, 1, &packing, &none));
  FAILS(NIB_INVALID_ARGUMENT, "no expert 4: the layer has 4", nib_experts_weight(down, EXPERTS, &weight));
  CHECK(none == NULL);

  free(workspace);
  OK(nib_moe_plan_destroy(plan));
  OK(nib_moe_plan_destroy(NULL));
  OK(nib_experts_destroy(gate_up));
  OK(nib_experts_destroy(down));
  OK(nib_experts_destroy(NULL));
  OK(nib_context_destroy(context));
  for (int e = 0; e < EXPERTS; ++e) {
    OK(nib_qtensor_destroy(gate_ups[e]));
    OK(nib_qtensor_destroy(downs[e]));
  }
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

static void test_packed_files(const char* golden, const char* scratch) {
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
