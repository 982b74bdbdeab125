# What NIBBLE_CUDA_ARCHITECTURES means: cmake -P tests/cuda_architectures.cmake
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/../cmake/NibbleCudaArchitectures.cmake)

function(expect wanted offered expected)
  nibble_cuda_architectures(found "${wanted}" "${offered}")
  if(NOT found STREQUAL expected)
    message(SEND_ERROR "'${wanted}' of '${offered}' is '${found}', not '${expected}'")
  endif()
endfunction()

set(mma 75-real 80-real 90-real 100-real 120-real)
set(wgmma 90a-real)
foreach(everything "" all all-major "80;all")
  expect("${everything}" "${mma}" "${mma}")
  expect("${everything}" "${wgmma}" "${wgmma}")
endforeach()
foreach(hopper 90 90a 90-real 90a-real "90;90a")  # all mean what an H100 runs
  expect("${hopper}" "${mma}" 90-real)
  expect("${hopper}" "${wgmma}" 90a-real)
endforeach()
expect("80;90a" "${mma}" "80-real;90-real")
expect(86 "${mma}" 80-real)  # machine code runs on later minor versions
expect("86;89" "${mma}" 80-real)
expect(103 "${mma}" 100-real)
expect(75 "${mma}" 75-real)
expect(70 "${mma}" 75-real)  # nothing runs there: the family is compiled all the same, and refuses
expect(80 "${wgmma}" 90a-real)

foreach(wrong sm_90 9.0 hopper)  # each in a process of its own: the error is fatal
  if(NOT DEFINED WRONG)
    execute_process(COMMAND ${CMAKE_COMMAND} -D WRONG=${wrong} -P ${CMAKE_CURRENT_LIST_FILE} RESULT_VARIABLE failed ERROR_VARIABLE said)
    if(NOT failed OR NOT said MATCHES "has '${wrong}'")
      message(SEND_ERROR "'${wrong}' is accepted, or the error does not name it: ${said}")
    endif()
  endif()
endforeach()
if(DEFINED WRONG)
  nibble_cuda_architectures(found "${WRONG}" "${mma}")
endif()
