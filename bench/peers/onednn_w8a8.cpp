// W8A8 of oneDNN and of nibble, interleaved on one thread. Not part of the build:
//
//   pip download --no-deps onednn-cpu-gomp onednn-devel-cpu-gomp, and unpack both wheels into DIR
//   g++ -O2 -std=c++20 -Iinclude -Ibuild/include -IDIR/.../include bench/peers/onednn_w8a8.cpp build/libnibble.a -lfmt -LDIR/.../lib
//       -ldnnl -o onednn_w8a8
//   OMP_NUM_THREADS=1 ./onednn_w8a8       both with AMX, where there is one
//   NIBBLE_ISA=avx512bf16 ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI OMP_NUM_THREADS=1 ./onednn_w8a8       both without
//
// oneDNN multiplies codes as they are, packed beforehand (format any), with a scale per output channel, into f32. nibble is timed
// twice: with A in f32, so that quantizing it counts, and with A in int8. Times are CPU time of the process, which other processes
// disturb less than the clock; a line is the median of kRounds rounds, of every round the ratio.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "nibble/nibble.hpp"
#include "oneapi/dnnl/dnnl.hpp"

namespace {

constexpr int kRounds = 11;

double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <class Work>
double seconds_of(Work work) {
  const double start = cpu_seconds();
  work();
  return cpu_seconds() - start;
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + kRounds / 2, v.end());
  return v[kRounds / 2];
}

class OneDnn {
 public:
  OneDnn(std::int64_t m, std::int64_t n, std::int64_t k, std::int8_t* a, std::int8_t* w, std::vector<float>& scales, float* d) {
    using namespace dnnl;
    using tag = memory::format_tag;
    using type = memory::data_type;
    primitive_attr attr;
    attr.set_scales_mask(DNNL_ARG_WEIGHTS, 1 << 1);
    const matmul::primitive_desc desc(engine_, {{m, k}, type::s8, tag::ab}, {{k, n}, type::s8, tag::any},
                                      {{m, n}, type::f32, tag::ab}, attr);
    matmul_ = matmul(desc);
    memory plain({{k, n}, type::s8, tag::ba}, engine_, w), packed(desc.weights_desc(), engine_);
    reorder(plain, packed).execute(stream_, plain, packed);
    args_ = {{DNNL_ARG_SRC, memory(desc.src_desc(), engine_, a)},
             {DNNL_ARG_WEIGHTS, packed},
             {DNNL_ARG_DST, memory(desc.dst_desc(), engine_, d)},
             {DNNL_ARG_ATTR_SCALES | DNNL_ARG_WEIGHTS, memory({{n}, type::f32, tag::a}, engine_, scales.data())}};
    stream_.wait();
    name_ = desc.impl_info_str();
  }
  void run() {
    matmul_.execute(stream_, args_);
    stream_.wait();
  }
  const std::string& name() const { return name_; }

 private:
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  dnnl::matmul matmul_;
  std::unordered_map<int, dnnl::memory> args_;
  std::string name_;
};

void compare(std::int64_t m, std::int64_t n, std::int64_t k) {
  using namespace nibble;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const ActScheme per_token{DType::s8, GroupShape::channel()};
  QuantTensor q{.scheme = {DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, .n = n, .k = k};
  q.codes.resize(static_cast<std::size_t>(n * k));
  for (auto& code : q.codes) code = static_cast<std::uint8_t>(random());
  q.scales = Tensor(DType::f32, {n, 1});
  for (std::int64_t i = 0; i < n; ++i) q.scales.set(i, 0.01f);
  std::vector<float> a(static_cast<std::size_t>(m * k)), d(static_cast<std::size_t>(m * n)), d2(d),
      scales(static_cast<std::size_t>(n), 0.01f);
  std::vector<float> a_scale(static_cast<std::size_t>(m), 1.0f);
  for (float& x : a) x = normal(random);
  std::vector<std::int8_t> codes(a.size());
  for (auto& code : codes) code = static_cast<std::int8_t>(random());

  auto executor = make_executor(1);
  const PackedWeight weight = *pack(q, LinearSpec{.m_max = m, .act_scheme = per_token});
  const Plan floats = *Plan::linear(weight, {.m_max = m, .act_scheme = per_token}, {.threads = 1});
  const Plan ints = *Plan::linear(weight, {.a_dtype = DType::s8, .m_max = m, .act_scheme = per_token}, {.threads = 1});
  std::vector<std::byte> workspace(std::max(floats.workspace_bytes(), ints.workspace_bytes()));
  const TensorView out(d.data(), {m, n});
  OneDnn peer(m, n, k, codes.data(), reinterpret_cast<std::int8_t*>(q.codes.data()), scales, d2.data());
  std::vector<double> ours, ours_ints, theirs, ratio, ratio_ints;
  for (int round = 0; round < kRounds; ++round) {
    theirs.push_back(seconds_of([&] { peer.run(); }));
    ours.push_back(seconds_of([&] {
      (void)floats.run(weight, ConstTensorView(a.data(), {m, k}), out, {}, workspace, executor.get());
    }));
    ours_ints.push_back(seconds_of([&] {
      const Operands args{.a_scale = ConstTensorView(a_scale.data(), {m})};
      (void)ints.run(weight, ConstTensorView(codes.data(), {m, k}), out, args, workspace, executor.get());
    }));
    ratio.push_back(theirs.back() / ours.back());
    ratio_ints.push_back(theirs.back() / ours_ints.back());
  }
  double worst = 0;
  for (std::size_t i = 0; i < d.size(); ++i) worst = std::max(worst, static_cast<double>(std::abs(d[i] - d2[i])));
  const double gop = 2e-9 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  std::printf(
      "M=%4ld N=%5ld K=%5ld  oneDNN %5.0f Gop/s  nibble %5.0f (A f32), %5.0f (A s8)  nibble/oneDNN %.2f, %.2f  differ by %.2g  "
      "%s\n",
      m, n, k, gop / median(theirs), gop / median(ours), gop / median(ours_ints), median(ratio), median(ratio_ints), worst,
      peer.name().c_str());
}

}  // namespace

int main() {
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{6144, 4096}, {4096, 4096}, {4096, 14336}})
    for (std::int64_t m : {1, 4, 16, 64, 256}) compare(m, n, k);
}
