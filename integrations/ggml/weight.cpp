#include "weight.hpp"

#include <algorithm>
#include <string>

namespace nibble::ggml {

void log_error(const char* what, const char* reason) {
  ggml_log_callback log = nullptr;
  void* user = nullptr;
  ggml_log_get(&log, &user);
  log(GGML_LOG_LEVEL_ERROR, ("nibble: " + std::string(what) + ": " + reason + "\n").c_str(), user);
}

void Weight::write(const std::byte* data, std::size_t offset, std::size_t size) {
  std::vector<std::byte> whole;
  if (size != bytes()) {
    whole.resize(bytes());
    read(whole.data(), 0, whole.size());
    std::copy_n(data, size, whole.data() + offset);
    data = whole.data();
  }
  if (!pack(data)) {
    log_error("a weight cannot be packed", nib_last_error());
    plan_.reset();
    weight_.reset();
    if (data != memory_) std::copy_n(data, bytes(), memory_);
  }
}

bool Weight::pack(const std::byte* blocks) {
  nib_weight* weight = nullptr;
  nib_plan* plan = nullptr;
  const QTensor q = decode(format_, n_, k_, blocks);
  if (q == nullptr) return false;
  const nib_linear_desc linear{.struct_size = sizeof linear, .act_scheme = act_scheme_, .m_max = kMaxRows};
  const nib_pack_desc desc{.struct_size = sizeof desc, .linear = &linear};
  if (nib_pack(q.get(), &desc, &weight) != NIB_OK) return false;
  weight_.reset(weight);
  if (nib_plan_linear(weight, nullptr, nullptr, &plan) != NIB_OK) return false;
  plan_.reset(plan);
  if (format_.scale != NIB_F16) {
    heads_.resize(static_cast<std::size_t>(n_ * (k_ / format_.length)) * static_cast<std::size_t>(format_.head_bytes));
    copy_heads(format_, n_, k_, blocks, heads_.data());
  }
  return nib_plan_workspace_size(plan, &workspace_bytes_) == NIB_OK;
}

void Weight::read(std::byte* data, std::size_t offset, std::size_t size) const {
  if (!packed()) {
    std::copy_n(memory_ + offset, size, data);
    return;
  }
  nib_qtensor* q = nullptr;
  std::vector<std::byte> whole(size == bytes() ? 0 : bytes());
  std::byte* blocks = whole.empty() ? data : whole.data();
  const bool unpacked = nib_unpack(weight_.get(), &q) == NIB_OK;
  const QTensor owner(q);
  if (!unpacked || !encode(format_, q, heads_.empty() ? nullptr : heads_.data(), blocks))
    GGML_ABORT("nibble: a packed weight cannot be read: %s", nib_last_error());
  if (!whole.empty()) std::copy_n(blocks + offset, size, data);
}

bool Weight::run(const nib_context* context, const float* a, std::int64_t a_stride, std::int64_t m, float* d,
                 std::byte* workspace) const {
  nib_view a_view = nib_matrix(a, NIB_F32, m, k_);
  a_view.strides[0] = a_stride;
  const nib_view d_view = nib_matrix(d, NIB_F32, m, n_);
  const nib_operands operands{.struct_size = sizeof operands, .context = context, .a = &a_view, .d = &d_view};
  return nib_plan_run(plan_.get(), weight_.get(), &operands, workspace, workspace_bytes_, nullptr) == NIB_OK;
}

}  // namespace nibble::ggml
