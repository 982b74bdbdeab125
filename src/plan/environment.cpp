#include "core/environment.hpp"

#include "core/error.hpp"
#include "plan/choose.hpp"

namespace nibble {

Status check_environment() {
  NIBBLE_RETURN_IF_ERROR(isa_of_environment().status());
  NIBBLE_RETURN_IF_ERROR(threads_of_environment().status());
  return kernel_of_environment().status();
}

}  // namespace nibble
