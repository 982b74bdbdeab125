/* Runs a layer of a quantized checkpoint on 16 tokens and says how far the result is from its weight as floats: checkpoint.cpp, in C.
 *
 * usage: checkpoint DIR */
#include <math.h>
#include <nibble/nibble.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call) \
  if ((call) != NIB_OK) return fprintf(stderr, "%s\n", nib_last_error()), 1

enum { M = 16 };

int main(int argc, char** argv) {
  if (argc != 2) return fprintf(stderr, "usage: %s DIR\n", argv[0]), 2;
  const char* directory = argv[1];
  nib_plan *plan = NULL, *floats = NULL;
  /* docs: begin read */
  nib_checkpoint* checkpoint = NULL;
  nib_qtensor* q = NULL;
  nib_weight* weight = NULL;
  size_t index = 0;
  TRY(nib_checkpoint_open(directory, &checkpoint));
  TRY(nib_checkpoint_find_module(checkpoint, "model.layers.0.mlp.down_proj", &index));
  TRY(nib_checkpoint_read(checkpoint, index, &q, NULL));

  const nib_linear_desc linear = {.struct_size = sizeof linear, .m_max = M}; /* f32 activations, up to M tokens */
  const nib_pack_desc packing = {.struct_size = sizeof packing, .linear = &linear};
  TRY(nib_pack(q, &packing, &weight));
  TRY(nib_plan_linear(weight, NULL, NULL, &plan)); /* for what the weight was packed for */
  /* docs: end read */
  nib_qtensor_destroy(q);
  nib_checkpoint_destroy(checkpoint);

  nib_weight_info info = {.struct_size = sizeof info};
  TRY(nib_weight_get(weight, &info));
  const size_t n = (size_t)info.n, k = (size_t)info.k;
  size_t bytes = 0, more = 0;
  TRY(nib_plan_dequantize(weight, NULL, NULL, &floats));
  TRY(nib_plan_workspace_size(plan, &bytes));
  TRY(nib_plan_workspace_size(floats, &more));
  if (bytes < more) bytes = more;
  void* workspace = malloc(bytes);
  float *a = malloc(M * k * sizeof *a), *d = malloc(M * n * sizeof *d), *w = malloc(n * k * sizeof *w);
  for (size_t i = 0; i < M * k; ++i) a[i] = sinf((float)i);
  const nib_view va = nib_matrix(a, NIB_F32, M, info.k), vd = nib_matrix(d, NIB_F32, M, info.n),
                 vw = nib_matrix(w, NIB_F32, info.n, info.k);
  const nib_operands run = {.struct_size = sizeof run, .a = &va, .d = &vd}, dequantize = {.struct_size = sizeof run, .d = &vw};
  TRY(nib_plan_run(plan, weight, &run, workspace, bytes, NULL));
  TRY(nib_plan_run(floats, weight, &dequantize, workspace, bytes, NULL));

  double error = 0, norm = 0;
  for (size_t i = 0; i < M; ++i)
    for (size_t j = 0; j < n; ++j) {
      double exact = 0;
      for (size_t l = 0; l < k; ++l) exact += (double)a[i * k + l] * w[j * k + l];
      error += (d[i * n + j] - exact) * (d[i * n + j] - exact);
      norm += exact * exact;
    }
  printf("W[%zu,%zu] as %s: relative error %.1e\n", n, k, info.scheme, sqrt(error / norm));
  free(a), free(d), free(w), free(workspace);
  nib_plan_destroy(plan);
  nib_plan_destroy(floats);
  nib_weight_destroy(weight);
  return sqrt(error / norm) < 1e-5 ? 0 : 1;
}
