/* Quantizes a layer to 4 bits, runs it on 8 tokens and says how far the result is from the float layer's: quickstart.cpp, in C. */
#include <math.h>
#include <nibble/nibble.h>
#include <stdio.h>
#include <stdlib.h>

/* Every call can fail; the reason is one line. */
#define TRY(call) \
  if ((call) != NIB_OK) return fprintf(stderr, "%s\n", nib_last_error()), 1

enum { M = 8, N = 512, K = 1024 };
static float w[N * K], a[M * K], d[M * N];

int main(void) {
  srand(1);
  for (int i = 0; i < N * K; ++i) w[i] = 0.1f * ((float)rand() / (float)RAND_MAX - 0.5f);
  for (int i = 0; i < M * K; ++i) a[i] = 2.0f * ((float)rand() / (float)RAND_MAX - 0.5f);
  const nib_view vw = nib_matrix(w, NIB_F32, N, K), va = nib_matrix(a, NIB_F32, M, K), vd = nib_matrix(d, NIB_F32, M, N);

  /* Once: quantize (or read a checkpoint), pack, plan. Handles do not depend on each other; q can go as soon as it is packed. */
  nib_qtensor* q = NULL;
  nib_weight* weight = NULL;
  nib_plan* plan = NULL;
  const nib_quantize_desc how = {.struct_size = sizeof how, .scheme = "u4b8g128"};
  TRY(nib_quantize(NULL, &vw, &how, &q));
  const nib_epilogue silu = {.struct_size = sizeof silu, .activation = NIB_ACTIVATION_SILU};
  const nib_linear_desc linear = {.struct_size = sizeof linear, .epilogue = &silu, .m_max = M};
  const nib_pack_desc packing = {.struct_size = sizeof packing, .linear = &linear};
  TRY(nib_pack(q, &packing, &weight));
  nib_qtensor_destroy(q);
  TRY(nib_plan_linear(weight, NULL, NULL, &plan)); /* for what the weight was packed for */
  size_t workspace_bytes = 0;
  TRY(nib_plan_workspace_size(plan, &workspace_bytes));
  void* workspace = malloc(workspace_bytes);

  /* Often: nothing is allocated here. */
  const nib_operands operands = {.struct_size = sizeof operands, .a = &va, .d = &vd};
  TRY(nib_plan_run(plan, weight, &operands, workspace, workspace_bytes, NULL));

  double error = 0, norm = 0;
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      double x = 0;
      for (int k = 0; k < K; ++k) x += (double)a[m * K + k] * w[n * K + k];
      x /= 1 + exp(-x);
      error += (d[m * N + n] - x) * (d[m * N + n] - x);
      norm += x * x;
    }
  const char* kernel = NULL;
  nib_weight_info info = {.struct_size = sizeof info};
  TRY(nib_plan_kernel(plan, M, &kernel));
  TRY(nib_weight_get(weight, &info));
  printf("W[512,1024] as %s: %zu bytes instead of %zu, kernel %s, relative error %.3f\n", info.scheme, info.bytes, sizeof w,
         kernel, sqrt(error / norm));
  free(workspace);
  nib_plan_destroy(plan);
  nib_weight_destroy(weight);
  return sqrt(error / norm) < 0.2 ? 0 : 1;
}
