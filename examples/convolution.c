/* Quantizes a 3×3 convolution to 8 bits, runs it on two images and says how far the result is from that of the float filter. */
#include <math.h>
#include <nibble/nibble.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call) \
  if ((call) != NIB_OK) return fprintf(stderr, "%s\n", nib_last_error()), 1

enum { B = 2, C = 64, CO = 32, H = 14, W = 14 };
static float w[CO][C][3][3], x[B][H][W][C], y[B][H][W][CO];

static float random_number(void) { return 2.0f * ((float)rand() / (float)RAND_MAX - 0.5f); }

/* One output: the sum over the filter, where it is inside the image. */
static double exact(int b, int h, int i, int co) {
  double sum = 0;
  for (int kh = 0; kh < 3; ++kh)
    for (int kw = 0; kw < 3; ++kw) {
      const int row = h + kh - 1, column = i + kw - 1;
      if (row < 0 || row >= H || column < 0 || column >= W) continue;
      for (int c = 0; c < C; ++c) sum += (double)w[co][c][kh][kw] * x[b][row][column][c];
    }
  return sum;
}

int main(void) {
  srand(1);
  for (size_t i = 0; i < sizeof w / sizeof(float); ++i) (&w[0][0][0][0])[i] = random_number();
  for (size_t i = 0; i < sizeof x / sizeof(float); ++i) (&x[0][0][0][0])[i] = random_number();
  nib_qtensor* q = NULL;
  nib_weight* weight = NULL;
  nib_plan* plan = NULL;
  /* docs: begin program */
  const nib_view filter = {w, NIB_F32, 4, {CO, C, 3, 3}, {C * 9, 9, 3, 1}}; /* [Co,C/groups,Kh,Kw] and its strides */
  const nib_quantize_desc how = {.struct_size = sizeof how, .scheme = "u8b128g64"};
  TRY(nib_quantize_conv(NULL, &filter, &how, &q)); /* remembers Kh and Kw; nib_qtensor_desc and nib_weight_info have them */

  const nib_conv_desc conv = {.struct_size = sizeof conv,
                              .height = H,
                              .width = W,
                              .padding_top = 1,
                              .padding_bottom = 1,
                              .padding_left = 1,
                              .padding_right = 1,
                              .input = NIB_NHWC,
                              .output = NIB_NHWC,
                              .batch_max = B};
  const nib_pack_desc packing = {.struct_size = sizeof packing, .conv = &conv};
  TRY(nib_pack(q, &packing, &weight));
  TRY(nib_plan_conv(weight, NULL, NULL, &plan)); /* for what the weight was packed for */
  const nib_view a = nib_images(x, NIB_F32, NIB_NHWC, B, C, H, W), d = nib_images(y, NIB_F32, NIB_NHWC, B, CO, H, W);
  /* docs: end program */
  size_t bytes = 0;
  TRY(nib_plan_workspace_size(plan, &bytes));
  void* workspace = malloc(bytes);
  const nib_operands operands = {.struct_size = sizeof operands, .a = &a, .d = &d};
  TRY(nib_plan_run(plan, weight, &operands, workspace, bytes, NULL));

  double error = 0, norm = 0;
  for (int b = 0; b < B; ++b)
    for (int h = 0; h < H; ++h)
      for (int i = 0; i < W; ++i)
        for (int co = 0; co < CO; ++co) {
          const double value = exact(b, h, i, co);
          error += (y[b][h][i][co] - value) * (y[b][h][i][co] - value);
          norm += value * value;
        }
  printf("3x3 filters [32,64,3,3] in 8 bits: relative error %.4f\n", sqrt(error / norm));
  free(workspace);
  nib_plan_destroy(plan);
  nib_weight_destroy(weight);
  nib_qtensor_destroy(q);
  return sqrt(error / norm) < 0.02 ? 0 : 1;
}
