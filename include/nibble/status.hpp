// Status and Result: how every nibble call reports failure.
//
// nibble never prints, aborts or throws across its boundary. A Status is a code a program can act on plus one line of text
// for a person: what is wrong, with the values, and the remedy.
#pragma once

#include <cassert>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace nibble {

/// What a program can act on.
enum class StatusCode {
  ok = 0,
  invalid_argument,  // the caller's values contradict each other or the documented range
  unsupported,       // well-formed, but nibble has no implementation for it, or the machine no GPU
  not_found,         // a file, tensor, module or kernel of that name does not exist
  already_exists,    // an output that would be overwritten
  io_error,          // the operating system refused: permissions, full disk, no memory
  corrupt_data,      // a file breaks the rules of its format
  internal,          // a bug in nibble; please report it
};

/// The code as text: "invalid_argument", "corrupt_data", ...
std::string_view name(StatusCode code);

enum class Isa : std::uint8_t;  // device.hpp

/// A reason why no layout or kernel takes a layer: one of Status::refusals() of pack(), explain() and plans.
struct Refusal {
  std::string_view layout;   // LayoutInfo::name of a layout that the weight could be packed in; empty: it is packed
  std::string_view kernel;   // KernelInfo::name of the first kernel with this reason; empty: the layout cannot hold the weight
  int others = 0;            // further kernels with this reason
  std::optional<Isa> needs;  // the instructions that the machine lacks, where that is the reason
  std::string reason;        // with the values
};

/// Success, or a code and a one-line message.
class [[nodiscard]] Status {
 public:
  /// Ok.
  Status() = default;
  /// A failure: a code that is not ok and one line, with the values and the remedy.
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}
  /// The same with the reasons that its text lists.
  Status(StatusCode code, std::string message, std::vector<Refusal> refusals);

  /// Ok, spelled out.
  static Status ok_status() { return {}; }

  /// Whether it succeeded.
  bool ok() const { return code_ == StatusCode::ok; }
  /// ok().
  explicit operator bool() const { return ok(); }
  /// StatusCode::ok on success.
  StatusCode code() const { return code_; }
  /// Empty when ok.
  const std::string& message() const { return message_; }
  /// Where no layout or kernel takes a layer: each one's reason, which message() lists; else empty.
  const std::vector<Refusal>& refusals() const;

  /// The same failure with "context: " before its text; ok stays ok.
  Status with_context(std::string_view context) const;

 private:
  StatusCode code_ = StatusCode::ok;
  std::string message_;
  std::shared_ptr<const std::vector<Refusal>> refusals_;  // null: none
};

/// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  /// Success.
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT(google-explicit-constructor)
  /// Failure; precondition: !status.ok().
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {  // NOLINT(google-explicit-constructor)
    assert(!std::get<1>(state_).ok());
  }

  /// Whether there is a value.
  bool ok() const { return state_.index() == 0; }
  /// ok().
  explicit operator bool() const { return ok(); }
  /// Why there is none; ok when there is.
  Status status() const { return ok() ? Status{} : std::get<1>(state_); }

  /// @{
  /// The value; precondition: ok().
  T& value() & { return *std::get_if<0>(&state_); }
  const T& value() const& { return *std::get_if<0>(&state_); }
  T&& value() && { return std::move(*std::get_if<0>(&state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return std::get_if<0>(&state_); }
  const T* operator->() const { return std::get_if<0>(&state_); }
  /// @}

 private:
  std::variant<T, Status> state_;
};

}  // namespace nibble
