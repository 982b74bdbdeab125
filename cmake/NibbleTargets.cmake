# Settings every target of this project shares. Nothing global: a parent project's flags stay its own.
function(nibble_target target)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion
                         -Wno-missing-field-initializers)  # designated initializers leave the rest at their defaults
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -Wno-restrict)  # GCC 12 sees overlaps in "literal" + std::string (its bug 105651)
  endif()
  if(NIBBLE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(NIBBLE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${NIBBLE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_compile_definitions(${target} PRIVATE NIBBLE_SANITIZED)
    target_link_options(${target} PRIVATE -fsanitize=${NIBBLE_SANITIZE})
  endif()
endfunction()
