/* The C interface from C11: experts: routing, grouped products, layers, and files of them. */
#include <math.h>
#include <nibble/nibble.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c_api_test.h"

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
  routing.backend = 7;
  FAILS(NIB_INVALID_ARGUMENT, "backend 7", nib_route(&routing));
}

/* Pairs of a token and an expert, in the order of tokens: each row is that of its expert's linear plan. */
static void test_ids(const nib_experts* experts, const nib_context* context) {
  enum { TOKENS_OF = 4, CHOICES = 2, PAIRS = TOKENS_OF * CHOICES };
  const int32_t ids[PAIRS] = {2, 0, 3, -1, 0, 2, 1, 3};
  static float x[TOKENS_OF * K], each[PAIRS * K], d[PAIRS * HIDDEN], wanted[HIDDEN];
  fill(x, TOKENS_OF * K, 43);
  for (int i = 0; i < PAIRS; ++i) memcpy(each + i * K, x + i / CHOICES * K, K * sizeof *x);
  nib_grouped_plan* plan = NULL;
  OK(nib_plan_grouped(experts, NULL, NULL, &plan));
  size_t bytes = 0, plain = 0;
  OK(nib_grouped_plan_ids_workspace_size(plan, &bytes));
  OK(nib_grouped_plan_workspace_size(plan, &plain));
  CHECK(bytes > plain);
  void* workspace = malloc(bytes);
  const nib_view vx = nib_matrix(x, NIB_F32, TOKENS_OF, K), ve = nib_matrix(each, NIB_F32, PAIRS, K),
                 vd = nib_matrix(d, NIB_F32, PAIRS, HIDDEN), vi = nib_matrix(ids, NIB_S32, TOKENS_OF, CHOICES);
  nib_operands operands = SIZED(nib_operands);
  nib_expert_rows rows = SIZED(nib_expert_rows);
  rows.ids = &vi;
  operands.context = context, operands.d = &vd;
  for (int by_pair = 0; by_pair < 2; ++by_pair) {
    operands.a = by_pair ? &ve : &vx;
    memset(d, 0xff, sizeof d);
    OK(nib_grouped_plan_run(plan, experts, &rows, &operands, workspace, bytes, NULL));
    for (int i = 0; i < PAIRS; ++i) {
      memset(wanted, 0, sizeof wanted);
      if (ids[i] >= 0) run_expert(experts, (size_t)ids[i], x + i / CHOICES * K, 1, K, wanted, HIDDEN);
      for (int n = 0; n < HIDDEN; ++n) CHECK(fabsf(d[i * HIDDEN + n] - wanted[n]) <= 1e-4f * (1 + fabsf(wanted[n])));
    }
  }
  const int32_t outside[PAIRS] = {0, 1, 2, 3, EXPERTS};
  const nib_view vb = nib_matrix(outside, NIB_S32, TOKENS_OF, CHOICES);
  rows.ids = &vb;
  FAILS(NIB_INVALID_ARGUMENT, "ids[2,0]=4 is outside [-1, 3]",
        nib_grouped_plan_run(plan, experts, &rows, &operands, workspace, bytes, NULL));
  rows.ids = &vi;
  FAILS(NIB_INVALID_ARGUMENT, "workspace", nib_grouped_plan_run(plan, experts, &rows, &operands, workspace, plain, NULL));
  FAILS(NIB_INVALID_ARGUMENT, "place for the size", nib_grouped_plan_ids_workspace_size(plan, NULL));
  free(workspace);
  OK(nib_grouped_plan_destroy(plan));
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
void test_expert_layers(const char* scratch) {
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

void test_experts(void) {
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
  test_ids(gate_up, context);

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
