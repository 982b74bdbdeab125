// Any descriptors in the C interface: refused with a text, or a matrix that is packed, planned and run. Memory is exactly as large as a
// view says; values that only describe may be any number.
#include <array>
#include <limits>
#include <memory>
#include <type_traits>

#include "fuzz/fuzz.hpp"
#include "nibble/nibble.h"

using nibble::fuzz::Choices;
using nibble::fuzz::require;

namespace {

constexpr std::int64_t kLargest = std::int64_t{1} << 16;  // bytes of a view, of a workspace

bool ok(nib_status status) {
  const std::string_view text = nib_last_error();
  require(status == NIB_OK || (status > NIB_OK && status < NIB_INTERNAL && !text.empty() && text.find('\n') == text.npos));
  return status == NIB_OK;
}

/// A handle, ended with its scope.
template <class T, nib_status (*kDestroy)(T*)>
struct Handle {
  T* get = nullptr;
  Handle() = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { require(kDestroy(get) == NIB_OK); }
};
using QTensor = Handle<nib_qtensor, nib_qtensor_destroy>;
using Weight = Handle<nib_weight, nib_weight_destroy>;
using Plan = Handle<nib_plan, nib_plan_destroy>;

/// A struct followed by spare memory, of the right or another size.
template <class T>
struct Sized {
  T value{};
  std::array<unsigned char, 32> behind{};
  void choose(Choices& choices) {
    const std::uint8_t kind = choices.byte();
    value.struct_size = sizeof(T);
    if (kind < 0xf0) return;
    value.struct_size = kind < 0xf8 ? static_cast<std::size_t>(choices.byte()) : sizeof(T) + 8 * (kind & 3);
    value.struct_size = std::min(value.struct_size, sizeof *this);
    behind.fill(static_cast<unsigned char>(choices.byte() & 1));
  }
};

class Maker {
 public:
  explicit Maker(Choices& choices) : choices_(choices) {}

  std::int64_t number() {
    static constexpr std::int64_t kNumbers[] = {0,
                                                1,
                                                1,
                                                1,
                                                2,
                                                3,
                                                4,
                                                5,
                                                7,
                                                8,
                                                16,
                                                17,
                                                32,
                                                64,
                                                100,
                                                1 << 13,
                                                1 << 20,
                                                -1,
                                                std::numeric_limits<std::int32_t>::max(),
                                                std::numeric_limits<std::int64_t>::max(),
                                                std::numeric_limits<std::int64_t>::min()};
    const std::uint8_t kind = choices_.byte();
    return kind < 0xf0 ? kNumbers[kind % std::size(kNumbers)] : choices_.raw<std::int64_t>();
  }
  const char* text(std::initializer_list<const char*> usual) {
    const std::uint8_t kind = choices_.byte();
    if (kind < 0xf0) return std::data(usual)[kind % usual.size()];
    texts_.push_back(std::make_unique<std::string>(choices_.text(choices_.byte() % 24)));
    return texts_.back()->c_str();
  }
  template <class T>
  const T* maybe(T value) {
    if (choices_.flag()) return nullptr;
    auto memory = std::make_unique<std::byte[]>(sizeof value);
    std::memcpy(memory.get(), &value, sizeof value);
    memory_.push_back(std::move(memory));
    return reinterpret_cast<const T*>(memory_.back().get());
  }
  /// A dense view of `shape`, or one with a mistake.
  nib_view view(nib_dtype dtype, std::initializer_list<std::int64_t> shape) {
    nib_view v{};
    v.dtype = dtype;
    v.rank = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), v.shape);
    std::int64_t stride = 1;
    for (int i = v.rank; i-- > 0;) {
      v.strides[i] = stride;
      if (__builtin_mul_overflow(stride, v.shape[i], &stride)) return {};
    }
    const std::uint8_t kind = choices_.byte();
    const std::uint8_t at = choices_.byte() % 4;
    if (kind >= 0xf0 && kind < 0xf3) v.shape[at] = number();
    if (kind >= 0xf3 && kind < 0xf6) v.strides[at] = number();
    if (kind >= 0xf6 && kind < 0xf9) v.dtype = choices_.byte() % 40;
    if (kind >= 0xf9 && kind < 0xfb) v.rank = choices_.byte() % 7 - 1;
    if (kind >= 0xfb && kind < 0xfd) return {};
    v.data = memory_of(v);
    return v;
  }

 private:
  /// As many bytes as the view can reach; a few for an invalid one; null for too many.
  void* memory_of(const nib_view& v) {
    __int128 elements = 1;
    bool sound = v.rank >= 1 && v.rank <= 4, empty = false;
    for (int i = 0; sound && i < v.rank; ++i) {
      sound = v.shape[i] >= 0 && v.strides[i] >= 0;
      empty = empty || v.shape[i] == 0;
      elements += (static_cast<__int128>(v.shape[i]) - 1) * v.strides[i];
    }
    const std::int64_t width = v.dtype == NIB_F64 || v.dtype == NIB_S64 || v.dtype == NIB_U64 || v.dtype == NIB_C64 ? 8 : 4;
    const __int128 bytes = !sound || empty ? 16 : elements * narrow(v.dtype, width);
    if (bytes > kLargest) return nullptr;
    const auto size = static_cast<std::size_t>(bytes);
    auto memory = std::make_unique<std::byte[]>(size);
    const std::string_view rest = choices_.rest();
    for (std::size_t i = 0; i < size && !rest.empty(); ++i) memory[i] = static_cast<std::byte>(rest[i % rest.size()]);
    memory_.push_back(std::move(memory));
    return memory_.back().get();
  }
  static std::int64_t narrow(nib_dtype dtype, std::int64_t otherwise) {
    switch (dtype) {
      case NIB_F32:
      case NIB_S32:
      case NIB_U32: return 4;
      case NIB_F16:
      case NIB_BF16:
      case NIB_S16:
      case NIB_U16: return 2;
      case NIB_F64:
      case NIB_S64:
      case NIB_U64:
      case NIB_C64: return otherwise;
      default: return 1;
    }
  }

  Choices& choices_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<std::unique_ptr<std::string>> texts_;
};

constexpr nib_dtype kFloats[] = {NIB_F32, NIB_F32, NIB_F16, NIB_BF16, NIB_S8, NIB_E4M3, NIB_F64};
constexpr const char* kActs[] = {"s8r", "s8zr", "s8g32", "s8zg16", "s8t", "e4m3r", "e4m3t", "s8og16", "u4r"};

void make_matrix(Choices& choices, Maker& maker, QTensor& q) {
  Sized<nib_qtensor_desc> desc;
  desc.choose(choices);
  struct Kind {
    const char* scheme;
    std::int64_t rows_of, columns_of;  // that share a scale; 0: all
    nib_dtype zeros;
  };
  static constexpr Kind kKinds[] = {{"u4zg16", 1, 16, NIB_U8},   {"u4b8g32", 1, 32, NIB_NONE}, {"s8c", 1, 0, NIB_NONE},
                                    {"u8b128t", 0, 0, NIB_NONE}, {"e4m3b8x8", 8, 8, NIB_NONE}, {"u4og16", 1, 16, NIB_F32},
                                    {"u3b4c", 1, 0, NIB_NONE},   {"s8zg16", 1, 16, NIB_S8},    {"u4oci8", 1, 8, NIB_F32}};
  const Kind& kind = choices.of(kKinds);
  nib_qtensor_desc& d = desc.value;
  d.scheme = choices.byte() < 0xf0 ? kind.scheme : maker.text({"u4zg128", "s8r_s8c"});
  d.n = choices.below(40);
  d.k = 16 * choices.below(8);
  if (choices.byte() >= 0xc0) d.k += choices.below(16);
  const std::int64_t rows = kind.rows_of == 0 ? 1 : (d.n + kind.rows_of - 1) / kind.rows_of;
  const std::int64_t columns = kind.columns_of == 0 ? 1 : (d.k + kind.columns_of - 1) / kind.columns_of;
  d.codes = maker.view(NIB_U8, {d.n, d.k});
  if (d.codes.data != nullptr && d.codes.dtype == NIB_U8 && d.codes.rank == 2 && choices.byte() < 0xf0)
    for (std::int64_t i = 0; i < d.n * d.k && i < kLargest; ++i)
      if (d.codes.shape[0] == d.n && d.codes.shape[1] == d.k && d.codes.strides[1] == 1 && d.codes.strides[0] == d.k)
        static_cast<std::uint8_t*>(d.codes.data)[i] &= 7;
  d.scales = maker.view(choices.flag() ? NIB_F32 : NIB_F16, {rows, columns});
  if (kind.zeros != NIB_NONE) d.zeros = maker.view(kind.zeros, {rows, columns});
  const std::uint8_t parts = choices.byte();
  if ((parts & 0x81) == 0x81) d.g_idx = maker.view(NIB_S32, {d.k});
  if ((parts & 0x82) == 0x82) d.prescale = maker.view(NIB_F16, {d.k});
  if ((parts & 4) != 0) d.bias = maker.view(NIB_F32, {d.n});
  if ((parts & 0x88) == 0x88) d.scale2 = maker.maybe(choices.raw<float>());
  if ((parts & 0x90) == 0x90) d.act_scale = maker.maybe(choices.raw<float>());
  if ((parts & 0xa0) == 0xa0) d.act_zero = maker.maybe(choices.raw<std::int32_t>());
  if ((parts & 0xc0) == 0xc0) d.act_limit = maker.maybe(choices.raw<float>());
  if (choices.byte() >= 0xc0) d.filter_height = maker.number(), d.filter_width = maker.number();
  if (const std::uint8_t order = choices.byte(); order >= 0xc0) {
    d.nibble_order = order % 4;
    d.codes = maker.view(NIB_U8, {d.n, (d.k + 1) / 2});
  }
  if (!ok(nib_qtensor_create(&d, &q.get))) return;
  Sized<nib_qtensor_desc> got;
  got.choose(choices);
  (void)ok(nib_qtensor_get(q.get, &got.value));
}

nib_epilogue* epilogue(Choices& choices, Maker& maker, Sized<nib_epilogue>& e) {
  if (choices.byte() < 0x60) return nullptr;
  e.choose(choices);
  e.value.operands = choices.byte() < 0xf0 ? choices.byte() & 0x7f : choices.raw<std::uint32_t>();
  e.value.activation = choices.byte() % 8;
  e.value.clamp_low = choices.raw<float>();
  e.value.clamp_high = choices.raw<float>();
  e.value.out = choices.byte() % 40;
  e.value.out_scale = choices.flag() ? 0.5f : choices.raw<float>();
  e.value.out_zero = static_cast<std::int32_t>(maker.number());
  if (choices.flag()) e.value.out_low = static_cast<std::int32_t>(maker.number()), e.value.out_high = choices.byte();
  return &e.value;
}

void run(Choices& choices, Maker& maker, const Weight& weight, const Plan& plan, nib_dtype act, nib_dtype out,
         std::initializer_list<std::int64_t> a, std::initializer_list<std::int64_t> d) {
  static nib_context* const one_thread = [] {
    nib_context_desc desc{};
    desc.struct_size = sizeof desc;
    desc.threads = 1;
    nib_context* context = nullptr;
    require(nib_context_create(&desc, &context) == NIB_OK);
    return context;
  }();
  std::size_t workspace = 0;
  char* text = nullptr;
  const char* kernel = nullptr;
  require(nib_plan_workspace_size(plan.get, &workspace) == NIB_OK);
  (void)ok(nib_plan_kernel(plan.get, maker.number(), &kernel));
  if (choices.byte() >= 0xf0 && ok(nib_plan_explain(plan.get, &text))) nib_text_free(text);
  if (workspace > static_cast<std::size_t>(kLargest) * 16) return;
  const std::int64_t rows = *d.begin(), columns = d.size() > 1 ? d.begin()[1] : 0;
  Sized<nib_operands> operands;
  operands.choose(choices);
  const nib_view views[] = {maker.view(act == NIB_NONE ? NIB_F32 : act, a),
                            maker.view(out == NIB_NONE ? NIB_F32 : out, d),
                            maker.view(NIB_F32, {rows}),
                            maker.view(NIB_S32, {rows}),
                            maker.view(NIB_F32, {rows}),
                            maker.view(NIB_F32, {columns}),
                            maker.view(NIB_F32, {columns}),
                            maker.view(out == NIB_S8 || out == NIB_U8 ? NIB_F32 : out, d),
                            maker.view(NIB_F32, d),
                            maker.view(NIB_S32, {columns}),
                            maker.view(NIB_F32, {columns}),
                            maker.view(NIB_S32, {1})};
  nib_operands& o = operands.value;
  o.context = one_thread;
  const nib_view** members[] = {&o.a,    &o.d,    &o.a_scale,  &o.a_zero,   &o.row_scale, &o.col_scale,
                                &o.bias, &o.gate, &o.residual, &o.sum_bias, &o.out_scale, &o.out_zero};
  const unsigned present = choices.byte() | choices.byte() << 8u;
  for (std::size_t i = 0; i < std::size(members); ++i)
    if (i < 2 || (present >> (i - 2) & 1) != 0) *members[i] = &views[i];
  const auto memory = std::make_unique<std::byte[]>(workspace + 1);
  (void)ok(nib_plan_run(plan.get, weight.get, &o, memory.get(), workspace, nullptr));
}

void plan_and_run(Choices& choices, Maker& maker, const QTensor& q, const Weight& weight) {
  nib_qtensor_desc shape{};
  shape.struct_size = sizeof shape;
  require(nib_qtensor_get(q.get, &shape) == NIB_OK);
  Sized<nib_plan_options> options;
  options.choose(choices);
  options.value.threads = choices.byte() < 0xf0 ? 1 : static_cast<std::int32_t>(maker.number());
  options.value.forbid_reference = choices.byte() >= 0xe0 ? 1 : 0;
  if (choices.byte() >= 0xf0) options.value.kernel = maker.text({"linear_any_any_any__ref_baseline", ""});
  Plan plan;
  Sized<nib_epilogue> e;
  switch (choices.below(4)) {
    case 0: {
      Sized<nib_dequantize_desc> desc;
      desc.choose(choices);
      desc.value.out = choices.of(kFloats);
      desc.value.transposed = choices.below(2);
      if (!ok(nib_plan_dequantize(weight.get, &desc.value, &options.value, &plan.get))) return;
      const bool transposed = desc.value.transposed != 0;
      return run(choices, maker, weight, plan, NIB_F32, desc.value.out, {1, 1},
                 {transposed ? shape.k : shape.n, transposed ? shape.n : shape.k});
    }
    case 1: {
      Sized<nib_conv_desc> desc;
      desc.choose(choices);
      nib_conv_desc& d = desc.value;
      d.epilogue = epilogue(choices, maker, e);
      if (choices.byte() >= 0xc0) d.act_scheme = choices.of(kActs);
      const bool odd = choices.byte() >= 0xc0;
      const auto extent = [&](int most) { return odd ? maker.number() : choices.below(most + 1); };
      d.batch_max = extent(2);
      d.height = extent(7), d.width = extent(7);
      d.stride_height = extent(2), d.stride_width = extent(2);
      d.padding_top = extent(2), d.padding_bottom = extent(2), d.padding_left = extent(2), d.padding_right = extent(2);
      d.dilation_height = extent(2), d.dilation_width = extent(2);
      d.groups = extent(2);
      d.input = choices.below(3), d.output = choices.below(3);
      d.a_dtype = choices.of(kFloats);
      if (!ok(nib_plan_conv(weight.get, &d, &options.value, &plan.get)) || odd) return;
      const auto one = [](std::int64_t x) { return std::max<std::int64_t>(1, x); };
      const std::int64_t kh = one(shape.filter_height), kw = one(shape.filter_width);
      const auto size = [&](std::int64_t in, std::int64_t before, std::int64_t after, std::int64_t dilation, std::int64_t kernel,
                            std::int64_t stride) {
        return (in + before + after - one(dilation) * (kernel - 1) - 1) / one(stride) + 1;
      };
      const std::int64_t channels = shape.k / (kh * kw) * one(d.groups);
      return run(choices, maker, weight, plan, d.a_dtype, d.epilogue == nullptr ? NIB_F32 : d.epilogue->out,
                 {1, channels, d.height, d.width},
                 {1, shape.n, size(d.height, d.padding_top, d.padding_bottom, d.dilation_height, kh, d.stride_height),
                  size(d.width, d.padding_left, d.padding_right, d.dilation_width, kw, d.stride_width)});
    }
    default: {
      Sized<nib_linear_desc> desc;
      desc.choose(choices);
      nib_linear_desc& d = desc.value;
      d.epilogue = epilogue(choices, maker, e);
      if (choices.byte() >= 0xa0) d.act_scheme = choices.of(kActs);
      d.m_max = maker.number();
      d.a_dtype = choices.of(kFloats);
      if (!ok(nib_plan_linear(weight.get, &d, &options.value, &plan.get))) return;
      const std::int64_t m = 1 + choices.below(3);
      return run(choices, maker, weight, plan, d.a_dtype, d.epilogue == nullptr ? NIB_F32 : d.epilogue->out, {m, shape.k},
                 {m, shape.n});
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Choices choices(data, size);
  Maker maker(choices);
  QTensor q;
  if (choices.byte() < 0xe0) {
    make_matrix(choices, maker, q);
  } else {
    Sized<nib_quantize_desc> desc;
    desc.choose(choices);
    desc.value.scheme = maker.text({"u4b8g16", "u4zg32", "s8c", "e4m3c", "s8t"});
    desc.value.scale = choices.byte() % 40;
    desc.value.clip_search = choices.below(2);
    const nib_view w = maker.view(NIB_F32, {choices.below(20), 16 * choices.below(8)});
    (void)ok(nib_quantize(nullptr, &w, &desc.value, &q.get));
  }
  if (q.get == nullptr) return 0;
  Sized<nib_pack_desc> desc;
  desc.choose(choices);
  if (choices.byte() >= 0x80) desc.value.layout = maker.text({"cpu_n16", "cpu_n32", "plain", "gpu_tile", "gpu_w8"});
  if (choices.byte() >= 0xe0) desc.value.kernel = maker.text({"linear_any_any_any__ref_baseline", ""});
  Sized<nib_linear_desc> linear;
  linear.choose(choices);
  if (choices.byte() >= 0xc0) linear.value.act_scheme = choices.of(kActs);
  if (choices.byte() >= 0xc0) linear.value.m_max = maker.number();
  if (choices.byte() >= 0x80) desc.value.linear = &linear.value;
  desc.value.backend = choices.byte() < 0xf8 ? NIB_CPU : choices.byte() % 4;
  Weight weight;
  if (!ok(nib_pack(q.get, &desc.value, &weight.get))) return 0;
  Sized<nib_weight_info> info;
  info.choose(choices);
  (void)ok(nib_weight_get(weight.get, &info.value));
  plan_and_run(choices, maker, q, weight);
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  // Bytes below 0x60 select usual values; each seed has another matrix, size and operation.
  std::vector<std::string> seeds;
  for (char kind = 0; kind < 8; ++kind)
    for (char operation = 0; operation < 4; ++operation) {
      std::string seed(96, '\1');
      seed[2] = kind, seed[4] = 18, seed[5] = 4;
      std::fill(seed.begin() + 32, seed.end(), operation);
      seeds.push_back(seed + "nibble<0123<");
    }
  return seeds;
}
