// fmt's functions, once. A wheel may go to a machine without libfmt, and with fmt::fmt-header-only every file compiled them again.
// Here they are inline, and what is pinned below is what the other files call.
#define FMT_HEADER_ONLY 1
#include <fmt/format.h>

namespace {

[[gnu::used]] std::string (*const vformat)(fmt::string_view, fmt::format_args) = &fmt::vformat;
[[gnu::used]] void (*const throw_format_error)(const char*) = &fmt::detail::throw_format_error;
[[gnu::used]] bool (*const is_printable)(std::uint32_t) = &fmt::detail::is_printable;
[[gnu::used]] fmt::detail::thousands_sep_result<char> (*const thousands_sep)(fmt::detail::locale_ref) =
    &fmt::detail::thousands_sep_impl<char>;

}  // namespace
