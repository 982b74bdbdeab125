/* Every function that takes sizes, with sizes that overflow arithmetic: an error, in any sequence of calls. */
#include <limits.h>
#include <math.h>
#include <nibble/nibble.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;
#define CHECK(condition)                                                                        \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      ++failures;                                                                               \
      printf("%s:%d: %s is false; %.300s\n", __FILE__, __LINE__, #condition, nib_last_error()); \
    }                                                                                           \
  } while (0)
#define SIZED(type) \
  { .struct_size = sizeof(type) }

static uint64_t state = 1;
static unsigned draw(unsigned below) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (unsigned)(state >> 33) % below;
}

/* An invalid size, or a valid one. */
static int64_t any(void) {
  static const int64_t sizes[] = {INT64_MAX,
                                  INT64_MAX - 1,
                                  INT64_MAX / 2,
                                  INT64_MAX / 3,
                                  INT64_MIN,
                                  INT64_MIN + 1,
                                  INT64_MIN / 2,
                                  -1,
                                  0,
                                  1,
                                  2,
                                  3,
                                  NIB_MAX_SIZE,
                                  NIB_MAX_SIZE + 1,
                                  NIB_MAX_SIZE - 1,
                                  NIB_MAX_ELEMENTS,
                                  INT64_C(1) << 31,
                                  INT64_C(1) << 32,
                                  (INT64_C(1) << 32) + 1,
                                  INT64_C(1) << 62};
  return sizes[draw(sizeof sizes / sizeof *sizes)];
}
static int64_t mostly(int64_t usual) { return draw(4) == 0 ? any() : usual; }
/* Larger than any function accepts. */
static int64_t beyond(void) {
  int64_t size;
  do size = any();
  while (size >= 0 && size <= NIB_MAX_SIZE);
  return size;
}

enum { N = 8, K = 3 * 3 * 32, G = K / 32, ROUNDS = 4000 };
static uint8_t codes[N * K];
static float scales[N * G], x[N * K], y[N * K];

static void refused(nib_status status) {
  CHECK(status == NIB_INVALID_ARGUMENT || status == NIB_UNSUPPORTED);
  CHECK(strlen(nib_last_error()) > 10);
}

/* A view of existing memory, or a detectably invalid one. */
static nib_view odd_view(const void* data, nib_dtype dtype, int64_t rows, int64_t columns) {
  nib_view view = nib_matrix(data, dtype, rows, columns);
  switch (draw(6)) {
    case 0: view.shape[draw(2)] = beyond(); break;
    case 1: view.strides[draw(2)] = INT64_MAX - draw(3); break;
    case 2: view.strides[draw(2)] = INT64_MIN + draw(3); break;
    case 3: view.rank = draw(2) ? INT32_MAX : INT32_MIN; break;
    case 4: view.rank = 4, view.shape[2] = view.shape[3] = INT64_MAX, view.strides[2] = view.strides[3] = INT64_MAX; break;
    default: view.dtype = draw(2) ? INT32_MAX : -1;
  }
  return view;
}

static void test_matrices(void) {
  for (int i = 0; i < ROUNDS; ++i) {
    nib_qtensor_desc desc = SIZED(nib_qtensor_desc);
    desc.scheme = draw(8) ? "u4b8g32" : "u4b8b2147483647x2147483647";
    desc.n = mostly(N);
    desc.k = mostly(K);
    desc.codes = draw(2) ? nib_matrix(codes, NIB_U8, N, K) : odd_view(codes, NIB_U8, N, K);
    desc.scales = draw(2) ? nib_matrix(scales, NIB_F32, N, G) : odd_view(scales, NIB_F32, N, G);
    desc.filter_height = mostly(3);
    desc.filter_width = mostly(3);
    nib_qtensor* q = NULL;
    const nib_status status = nib_qtensor_create(&desc, &q);
    if (status != NIB_OK) refused(status);
    CHECK((status == NIB_OK) == (q != NULL));
    nib_qtensor_destroy(q);

    const nib_view w = odd_view(x, NIB_F32, N, K);
    q = NULL;
    refused(nib_quantize(NULL, &w, NULL, &q));
    refused(nib_quantize_conv(NULL, &w, NULL, &q));
    const nib_named_view tensors[] = {{"weight_packed", odd_view(codes, NIB_S32, N, K / 8)},
                                      {"weight_scale", odd_view(scales, NIB_F32, N, G)}};
    CHECK(nib_read_module(tensors, 2, NULL, &q, NULL) != NIB_OK);
    nib_act_quantize_desc acts = SIZED(nib_act_quantize_desc);
    const nib_view out = odd_view(codes, NIB_S8, N, K), found = odd_view(scales, NIB_F32, N, G);
    acts.scheme = draw(2) ? "s8g32" : "s8g2147483640";
    acts.a = &w;
    acts.codes = &out;
    acts.scales = &found;
    refused(nib_quantize_activations(&acts, NULL));
    nib_checkpoint_tensors stored = SIZED(nib_checkpoint_tensors);
    stored.qweight = stored.qzeros = stored.scales = codes;
    stored.n = beyond(), stored.k = beyond(), stored.group = any(), stored.bits = (int32_t)any();
    refused(nib_dequantize_checkpoint_tensors(&stored, &w, (int32_t)draw(2), NULL));
    CHECK(q == NULL);
  }
}

static nib_qtensor* make(int64_t kernel) {
  nib_qtensor_desc desc = SIZED(nib_qtensor_desc);
  desc.scheme = "u4b8g32";
  desc.n = N, desc.k = K;
  desc.codes = nib_matrix(codes, NIB_U8, N, K);
  desc.scales = nib_matrix(scales, NIB_F32, N, G);
  desc.filter_height = desc.filter_width = kernel;
  nib_qtensor* q = NULL;
  CHECK(nib_qtensor_create(&desc, &q) == NIB_OK);
  return q;
}

static void finish(nib_status status, nib_plan** made) {
  nib_plan* const plan = *made;
  *made = NULL;
  CHECK((status == NIB_OK) == (plan != NULL));
  if (status != NIB_OK) {
    refused(status);
    return;
  }
  size_t bytes = 0;
  const char* name = NULL;
  CHECK(nib_plan_workspace_size(plan, &bytes) == NIB_OK && bytes < (size_t)1 << 60);
  CHECK(nib_plan_kernel(plan, any(), &name) == NIB_OK && name != NULL);
  CHECK(nib_plan_destroy(plan) == NIB_OK);
}

static nib_conv_desc odd_conv(void) {
  nib_conv_desc conv = SIZED(nib_conv_desc);
  conv.batch_max = mostly(2), conv.height = mostly(20), conv.width = mostly(20);
  conv.stride_height = mostly(1), conv.stride_width = mostly(1);
  conv.padding_top = mostly(1), conv.padding_bottom = mostly(1), conv.padding_left = mostly(1), conv.padding_right = mostly(1);
  conv.dilation_height = mostly(1), conv.dilation_width = mostly(1), conv.groups = mostly(1);
  conv.input = (nib_image_layout)draw(2), conv.output = (nib_image_layout)draw(2);
  conv.act_scheme = draw(2) ? NULL : "s8g32";
  return conv;
}

static void test_plans(void) {
  nib_qtensor *q = make(1), *kernel = make(3);
  nib_weight *weight = NULL, *conv_weight = NULL;
  CHECK(nib_pack(q, NULL, &weight) == NIB_OK && nib_pack(kernel, NULL, &conv_weight) == NIB_OK);
  int planned = 0;
  for (int i = 0; i < ROUNDS; ++i) {
    nib_plan_options options = SIZED(nib_plan_options);
    options.threads = (int32_t)mostly(2);
    nib_linear_desc linear = SIZED(nib_linear_desc);
    linear.m_max = any();
    linear.act_scheme = draw(2) ? NULL : "s8r";
    nib_plan* plan = NULL;
    finish(nib_plan_linear(weight, &linear, &options, &plan), &plan);
    const nib_conv_desc conv = odd_conv();
    const nib_status status = nib_plan_conv(conv_weight, &conv, &options, &plan);
    planned += status == NIB_OK;
    finish(status, &plan);
    finish(nib_plan_conv(weight, &conv, &options, &plan), &plan); /* pointwise, without padding */

    nib_pack_desc packing = SIZED(nib_pack_desc);
    nib_linear_desc wide = SIZED(nib_linear_desc);
    wide.m_max = i % 16 == 0 ? any() : beyond();
    packing.linear = &wide;
    nib_weight* packed = NULL;
    const nib_status made = nib_pack(q, &packing, &packed);
    if (made != NIB_OK) refused(made);
    nib_weight_destroy(packed);

    /* Valid sizes would need memory to fill. */
    linear.m_max = beyond();
    nib_verify_desc verify = SIZED(nib_verify_desc);
    nib_verify_report report = SIZED(nib_verify_report);
    verify.linear = &linear;
    refused(nib_verify(q, &verify, &report, NULL));
    nib_conv_desc images = conv;
    images.batch_max = beyond();
    verify.linear = NULL, verify.conv = &images;
    refused(nib_verify(kernel, &verify, &report, NULL));

    nib_context_desc threads = SIZED(nib_context_desc);
    threads.threads = (int32_t)(draw(2) ? INT32_MAX - draw(9) : INT32_MIN + draw(9));
    nib_context* context = NULL;
    refused(nib_context_create(&threads, &context));
  }
  CHECK(planned > 10);

  const float odd[] = {NAN, INFINITY, -INFINITY, -1};
  for (int i = 0; i < 4; ++i) {
    nib_verify_desc verify = SIZED(nib_verify_desc);
    nib_verify_report report = SIZED(nib_verify_report);
    verify.outliers = odd[i];
    refused(nib_verify(q, &verify, &report, NULL));
    nib_roofline machine = {sizeof(nib_roofline), odd[i], 100, 0, 0, 1, 0};
    nib_plan_options options = SIZED(nib_plan_options);
    options.machine = &machine;
    nib_plan* plan = NULL;
    refused(nib_plan_linear(weight, NULL, &options, &plan));
    machine = (nib_roofline){sizeof(nib_roofline), 10, 100, odd[i], 0, 1, 0};
    refused(nib_plan_linear(weight, NULL, &options, &plan));
  }

  /* A run is no larger than its plan. */
  nib_plan* plan = NULL;
  nib_linear_desc two = SIZED(nib_linear_desc);
  two.m_max = 2;
  CHECK(nib_plan_linear(weight, &two, NULL, &plan) == NIB_OK);
  for (int i = 0; i < ROUNDS; ++i) {
    const nib_view a = odd_view(x, NIB_F32, 2, K), d = odd_view(y, NIB_F32, 2, N);
    nib_operands operands = SIZED(nib_operands);
    operands.a = &a, operands.d = &d;
    static char workspace[1 << 16];
    refused(nib_plan_run(plan, weight, &operands, workspace, sizeof workspace, NULL));
  }
  nib_plan_destroy(plan);
  nib_weight_destroy(weight);
  nib_weight_destroy(conv_weight);
  nib_qtensor_destroy(q);
  nib_qtensor_destroy(kernel);
}

static nib_experts* make_experts(int64_t n, int64_t k) {
  nib_qtensor_desc desc = SIZED(nib_qtensor_desc);
  desc.scheme = "u4b8g32";
  desc.n = n, desc.k = k;
  desc.codes = nib_matrix(codes, NIB_U8, n, k);
  desc.scales = nib_matrix(scales, NIB_F32, n, k / 32);
  nib_qtensor* q = NULL;
  CHECK(nib_qtensor_create(&desc, &q) == NIB_OK);
  const nib_qtensor* const both[] = {q, q};
  nib_experts *experts = NULL, *none = NULL;
  CHECK(nib_pack_experts(both, 2, NULL, &experts) == NIB_OK);
  refused(nib_pack_experts(both, SIZE_MAX, NULL, &none));
  nib_weight* weight = NULL;
  refused(nib_experts_weight(experts, SIZE_MAX, &weight));
  nib_qtensor_destroy(q);
  return experts;
}

static void test_experts(void) {
  enum { TOKENS = 2, WIDTH = 32, HIDDEN = 64 };
  static char workspace[1 << 16];
  static int32_t ids[TOKENS * 2];
  static const int32_t offsets[] = {0, 1, TOKENS};
  nib_experts *gate_up = make_experts(HIDDEN, WIDTH), *down = make_experts(WIDTH, HIDDEN);
  nib_grouped_plan* grouped = NULL;
  nib_moe_plan* layer = NULL;
  int planned = 0;
  for (int i = 0; i < ROUNDS; ++i) {
    nib_linear_desc linear = SIZED(nib_linear_desc);
    linear.m_max = any();
    nib_moe_desc desc = SIZED(nib_moe_desc);
    desc.tokens_max = any(), desc.top_k = mostly(2);
    nib_plan_options options = SIZED(nib_plan_options);
    options.threads = (int32_t)mostly(2);
    size_t bytes = 0;
    nib_status status = nib_plan_grouped(down, &linear, &options, &grouped);
    CHECK((status == NIB_OK) == (grouped != NULL));
    if (status != NIB_OK)
      refused(status);
    else
      CHECK(nib_grouped_plan_workspace_size(grouped, &bytes) == NIB_OK && bytes < (size_t)1 << 60);
    nib_grouped_plan_destroy(grouped), grouped = NULL;
    status = nib_plan_moe(gate_up, down, &desc, &options, &layer);
    CHECK((status == NIB_OK) == (layer != NULL));
    if (status != NIB_OK)
      refused(status);
    else
      CHECK(nib_moe_plan_workspace_size(layer, &bytes) == NIB_OK && bytes < (size_t)1 << 60);
    planned += status == NIB_OK;
    nib_moe_plan_destroy(layer), layer = NULL;
  }
  CHECK(planned > 10);

  nib_linear_desc two = SIZED(nib_linear_desc);
  nib_moe_desc few = SIZED(nib_moe_desc);
  two.m_max = few.tokens_max = few.top_k = TOKENS;
  CHECK(nib_plan_grouped(down, &two, NULL, &grouped) == NIB_OK && nib_plan_moe(gate_up, down, &few, NULL, &layer) == NIB_OK);
  for (int i = 0; i < ROUNDS; ++i) {
    const nib_view a = odd_view(x, NIB_F32, TOKENS, HIDDEN), d = odd_view(y, NIB_F32, TOKENS, WIDTH),
                   sorted = nib_vector(offsets, NIB_S32, 3), odd_ids = odd_view(ids, NIB_S32, TOKENS, 2),
                   weights = odd_view(y, NIB_F32, TOKENS, 2), logits = odd_view(x, NIB_F32, TOKENS, 2),
                   sound = nib_matrix(x, NIB_F32, TOKENS, 2), tokens = nib_matrix(x, NIB_F32, TOKENS, WIDTH),
                   results = nib_matrix(y, NIB_F32, TOKENS, WIDTH), chosen = nib_matrix(ids, NIB_S32, TOKENS, 2);
    nib_operands operands = SIZED(nib_operands);
    operands.a = &a, operands.d = &d;
    nib_expert_rows rows = SIZED(nib_expert_rows);
    rows.offsets = &sorted;
    refused(nib_grouped_plan_run(grouped, down, &rows, &operands, workspace, sizeof workspace, NULL));
    nib_moe_operands moe = SIZED(nib_moe_operands);
    moe.x = &tokens, moe.d = &results;
    moe.ids = draw(2) ? &odd_ids : &chosen, moe.weights = &weights;
    refused(nib_moe_plan_run(layer, gate_up, down, &moe, workspace, sizeof workspace, NULL));
    nib_route_desc routing = SIZED(nib_route_desc);
    routing.logits = draw(2) ? &logits : &sound, routing.ids = &chosen, routing.weights = &weights;
    routing.top_k = mostly(2), routing.groups = mostly(1), routing.top_groups = mostly(1);
    refused(nib_route(&routing));
  }
  nib_grouped_plan_destroy(grouped);
  nib_moe_plan_destroy(layer);
  nib_experts_destroy(gate_up);
  nib_experts_destroy(down);
}

static void test_memory(void) {
  nib_gpu_memory* memory = NULL;
  CHECK(nib_gpu_memory_create(SIZE_MAX, &memory) != NIB_OK && memory == NULL);
}

int main(void) {
  for (int i = 0; i < N * G; ++i) scales[i] = 0.5f;
  test_matrices();
  test_plans();
  test_experts();
  test_memory();
  printf("%d failures\n", failures);
  return failures != 0;
}
