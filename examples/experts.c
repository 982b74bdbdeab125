/* A layer of 8 experts, of which every token goes through 2: experts.cpp, in C; compared with linear plans of its experts. */
#include <math.h>
#include <nibble/nibble.h>
#include <stdio.h>
#include <stdlib.h>

/* Every call can fail; the reason is one line. */
#define TRY(call) \
  if ((call) != NIB_OK) return fprintf(stderr, "%s\n", nib_last_error()), 1

enum { EXPERTS = 8, TOP_K = 2, TOKENS = 16, K = 256, HIDDEN = 128, N = 256 };
static float w[2 * HIDDEN * K], x[TOKENS * K], d[TOKENS * N], logits[TOKENS * EXPERTS], weights[TOKENS * TOP_K];
static int32_t ids[TOKENS * TOP_K];

static void fill(float* values, size_t count, float most) {
  for (size_t i = 0; i < count; ++i) values[i] = most * (2.0f * ((float)rand() / (float)RAND_MAX) - 1.0f);
}

static int quantize(int64_t rows, int64_t columns, nib_qtensor** q) {
  fill(w, (size_t)(rows * columns), 0.1f);
  const nib_view view = nib_matrix(w, NIB_F32, rows, columns);
  TRY(nib_quantize(NULL, &view, NULL, q));
  return 0;
}

/* D of one row through an expert. */
static int run_linear(const nib_experts* experts, size_t e, const float* row, int64_t k, float* to, int64_t columns) {
  nib_weight* weight = NULL;
  nib_plan* plan = NULL;
  size_t bytes = 0;
  TRY(nib_experts_weight(experts, e, &weight));
  TRY(nib_plan_linear(weight, NULL, NULL, &plan));
  TRY(nib_plan_workspace_size(plan, &bytes));
  void* workspace = malloc(bytes);
  const nib_view va = nib_matrix(row, NIB_F32, 1, k), vd = nib_matrix(to, NIB_F32, 1, columns);
  const nib_operands operands = {.struct_size = sizeof operands, .a = &va, .d = &vd};
  TRY(nib_plan_run(plan, weight, &operands, workspace, bytes, NULL));
  free(workspace);
  nib_plan_destroy(plan);
  nib_weight_destroy(weight);
  return 0;
}

int main(void) {
  nib_qtensor *gate_ups[EXPERTS] = {NULL}, *downs[EXPERTS] = {NULL};
  for (int e = 0; e < EXPERTS; ++e)
    if (quantize(2 * HIDDEN, K, &gate_ups[e]) != 0 || quantize(N, HIDDEN, &downs[e]) != 0) return 1;
  fill(x, TOKENS * K, 1.0f);
  fill(logits, TOKENS * EXPERTS, 4.0f);
  const nib_view vx = nib_matrix(x, NIB_F32, TOKENS, K), vd = nib_matrix(d, NIB_F32, TOKENS, N);

  /* docs: begin layer */
  nib_experts *gate_up = NULL, *down = NULL;
  const nib_epilogue glu = {.struct_size = sizeof glu, .activation = NIB_ACTIVATION_SILU, .glu = 1};
  const nib_linear_desc first = {.struct_size = sizeof first, .epilogue = &glu, .m_max = TOKENS};
  const nib_linear_desc second = {.struct_size = sizeof second, .m_max = TOKENS};
  const nib_pack_desc gate_up_packing = {.struct_size = sizeof gate_up_packing, .linear = &first};
  const nib_pack_desc down_packing = {.struct_size = sizeof down_packing, .linear = &second};
  TRY(nib_pack_experts((const nib_qtensor* const*)gate_ups, EXPERTS, &gate_up_packing, &gate_up));
  TRY(nib_pack_experts((const nib_qtensor* const*)downs, EXPERTS, &down_packing, &down));

  nib_moe_plan* plan = NULL;
  size_t bytes = 0;
  const nib_moe_desc layer = {.struct_size = sizeof layer, .tokens_max = TOKENS, .top_k = TOP_K};
  TRY(nib_plan_moe(gate_up, down, &layer, NULL, &plan));
  TRY(nib_moe_plan_workspace_size(plan, &bytes));
  void* workspace = malloc(bytes);

  /* Often: logits of the router [T,E] become ids and weights [T,top_k], and the layer runs. */
  const nib_view vl = nib_matrix(logits, NIB_F32, TOKENS, EXPERTS), vi = nib_matrix(ids, NIB_S32, TOKENS, TOP_K),
                 vw = nib_matrix(weights, NIB_F32, TOKENS, TOP_K);
  const nib_route_desc routing = {.struct_size = sizeof routing, .top_k = TOP_K, .logits = &vl, .ids = &vi, .weights = &vw};
  TRY(nib_route(&routing));
  const nib_moe_operands operands = {.struct_size = sizeof operands, .x = &vx, .d = &vd, .ids = &vi, .weights = &vw};
  TRY(nib_moe_plan_run(plan, gate_up, down, &operands, workspace, bytes, NULL));
  /* docs: end layer */

  double worst = 0;
  for (int t = 0; t < TOKENS; ++t)
    for (int j = 0; j < TOP_K; ++j) {
      float hidden[HIDDEN], result[N];
      const size_t e = (size_t)ids[t * TOP_K + j];
      if (run_linear(gate_up, e, x + t * K, K, hidden, HIDDEN) != 0 || run_linear(down, e, hidden, HIDDEN, result, N) != 0)
        return 1;
      for (int n = 0; n < N; ++n) d[t * N + n] -= weights[t * TOP_K + j] * result[n];
    }
  for (int i = 0; i < TOKENS * N; ++i) worst = fmax(worst, fabs(d[i]));
  printf("%d tokens, kernels differ by %.1e at most\n", TOKENS, worst);
  free(workspace);
  nib_moe_plan_destroy(plan);
  nib_experts_destroy(gate_up);
  nib_experts_destroy(down);
  for (int e = 0; e < EXPERTS; ++e) {
    nib_qtensor_destroy(gate_ups[e]);
    nib_qtensor_destroy(downs[e]);
  }
  return worst < 1e-4 ? 0 : 1;
}
