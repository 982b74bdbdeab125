// Runs a layer of a quantized checkpoint on 16 tokens and says how far the result is from the same layer in double precision; then takes
// every quantized layer from the packed file beside the checkpoint, or packs it.
//
// usage: checkpoint DIR      with the layers of a Llama: `nibble sample float && nibble quantize float awq --format awq` makes one, and
//                            `nibble pack awq --a-dtype bf16 --m-max 16` its packed file
#include <nibble/nibble.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

using namespace nibble;

namespace {

// docs: begin must
/// The value; where there is none, the reason and the end of the program.
template <class T>
T must(Result<T> result) {
  if (!result) std::exit((std::fprintf(stderr, "%s\n", result.status().message().c_str()), 1));
  return *std::move(result);
}
// docs: end must

/// ‖D − A·Wᵀ‖ / ‖A·Wᵀ‖.
double relative_error(const QuantTensor& w, const std::vector<bf16>& a, const std::vector<bf16>& d, std::int64_t m) {
  std::vector<double> row(static_cast<std::size_t>(w.k));
  double error = 0, norm = 0;
  for (std::int64_t n = 0; n < w.n; ++n) {
    for (std::int64_t k = 0; k < w.k; ++k) row[k] = w.value(n, k);
    for (std::int64_t i = 0; i < m; ++i) {
      double exact = 0;
      for (std::int64_t k = 0; k < w.k; ++k) exact += to_f32(a[i * w.k + k]) * row[k];
      error += std::pow(to_f32(d[i * w.n + n]) - exact, 2);
      norm += exact * exact;
    }
  }
  return std::sqrt(error / norm);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: %s DIR\n", argv[0]), 2;
  constexpr std::int64_t m = 16;
  // docs: begin program
  const Checkpoint checkpoint = must(Checkpoint::open(argv[1]));  // memory-mapped
  const Module* layer = checkpoint.find_module("model.layers.0.mlp.down_proj");
  if (layer == nullptr) return std::fprintf(stderr, "%s has no such layer\n", argv[1]), 1;
  const QuantTensor quantized = must(checkpoint.read(*layer));
  const LinearSpec spec{.a_dtype = DType::bf16, .m_max = m, .epilogue = {.out = DType::bf16}};
  const PackedWeight weight = must(pack(quantized, spec));  // once: the order of bytes that the fastest kernels read
  const Plan plan = must(Plan::linear(weight));             // once for all layers of this shape: which kernel runs for which M
  std::vector<std::byte> workspace(plan.workspace_bytes());

  std::vector<bf16> a(m * weight.k()), d(m * weight.n());
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = to_bf16(std::sin(static_cast<float>(i)));
  const Status status =  // often: D[M,N] = A[M,K] · Wᵀ, without an allocation
      plan.run(weight, ConstTensorView(a.data(), {m, weight.k()}), TensorView(d.data(), {m, weight.n()}), {}, workspace);
  if (!status) return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
  // docs: end program
  const double error = relative_error(quantized, a, d, m);
  std::printf("%s as %s, by %s: relative error %.1e\n", layer->name.c_str(), quantized.scheme.name().c_str(),
              std::string(plan.kernel(m)).c_str(), error);

  // docs: begin layers
  const Result<PackedFile> packed = PackedFile::beside(checkpoint);  // DIR.nibble: `nibble pack DIR` writes it
  if (!packed && packed.status().code() != StatusCode::not_found)
    return std::fprintf(stderr, "%s\n", packed.status().message().c_str()), 1;
  std::vector<PackedWeight> weights;
  for (const Module& module : checkpoint.modules()) {  // every layer: its name, format, scheme, N and K
    if (!module.quantized()) continue;                 // f32, f16 or bf16
    ModuleWeight found = must(packed_weight(checkpoint, module, spec, packed ? &*packed : nullptr));
    if (packed && !found.packed_because.empty())
      std::printf("%s was packed now: %s\n", module.name.c_str(), found.packed_because.c_str());
    weights.push_back(std::move(found.weight));
  }
  // docs: end layers
  std::size_t bytes = 0;
  for (const PackedWeight& each : weights) bytes += each.bytes().size();
  std::printf("%zu layers packed, %zu bytes\n", weights.size(), bytes);
  return error < 0x1p-8 && weights.size() > 1 ? 0 : 1;  // bf16 has 8 bits
}
