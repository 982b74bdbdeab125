/* The C interface from C11: convolutions. */
#include <math.h>
#include <nibble/nibble.h>
#include <string.h>

#include "c_api_test.h"

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

void test_conv(void) {
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
