# Configures, builds and runs one consumer in a directory that starts empty. Called with -D project, work, nibble_source,
# nibble_build, compiler, c_compiler, generator and sanitize.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}\nfailed with ${result}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${work})
set(flags "")
if(sanitize)
  set(flags -fsanitize=${sanitize})
endif()
run(${CMAKE_COMMAND} --install ${nibble_build} --prefix ${work}/prefix)
run(${CMAKE_COMMAND} -S ${project} -B ${work}/build -G ${generator} -D CMAKE_CXX_COMPILER=${compiler} -D CMAKE_CXX_FLAGS=${flags}
    -D CMAKE_BUILD_TYPE=Debug  # whether it builds and runs, not how fast
    -D CMAKE_C_COMPILER=${c_compiler}
    -D CMAKE_PREFIX_PATH=${work}/prefix -D nibble_source=${nibble_source})
run(${CMAKE_COMMAND} --build ${work}/build --target consumer)
if(EXISTS ${work}/build/consumer)  # not where it is only compiled
  run(${work}/build/consumer)
  message("${output}")
endif()
