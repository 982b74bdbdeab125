# What is installed, in the components that the Debian packages are made of:
#
#   runtime      libnibble.so.1
#   development  headers, libnibble.so, libnibble.a, the CMake package, nibble.pc, nibble-static.pc
#   tools        nibble, its man page and completions
#   ggml         libggml-nibble.so where it is built; in no package
#
# find_package(nibble) gives nibble::nibble, the C++ interface (an archive), and nibble::shared, the C interface (libnibble.so). Each
# is a component of the CMake package too, so that a C program can ask for `shared` alone and needs nothing that nibble is made with.
# The target `installed` builds all of them.
include(CMakePackageConfigHelpers)

add_custom_target(installed)
foreach(target nibble nibble-shared nibble-cli ggml-nibble)
  if(TARGET ${target})
    add_dependencies(installed ${target})
  endif()
endforeach()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/nibble)
install(TARGETS nibble EXPORT nibbleTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(EXPORT nibbleTargets NAMESPACE nibble:: DESTINATION ${package_dir} COMPONENT development)
if(TARGET nibble-shared)
  install(TARGETS nibble-shared EXPORT nibbleSharedTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime
          NAMELINK_COMPONENT development)
  install(EXPORT nibbleSharedTargets NAMESPACE nibble:: DESTINATION ${package_dir} COMPONENT development)
endif()
install(DIRECTORY include/nibble ${PROJECT_BINARY_DIR}/include/nibble DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")

configure_package_config_file(cmake/nibbleConfig.cmake.in ${PROJECT_BINARY_DIR}/nibbleConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/nibbleConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/nibbleConfig.cmake ${PROJECT_BINARY_DIR}/nibbleConfigVersion.cmake
        DESTINATION ${package_dir} COMPONENT development)

# Paths relative to the file itself: the prefix may be chosen when installing, and changed after.
file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
if(TARGET nibble-shared)
  configure_file(cmake/nibble.pc.in ${PROJECT_BINARY_DIR}/nibble.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/nibble.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
endif()
# The archive is linked by its file name: beside libnibble.so, -lnibble would be that.
set(pc_cuda "")
if(NIBBLE_CUDA)
  set(pc_cuda "-l:${cudart} -ldl -lrt ")  # installed by src/kernels/cuda
endif()
configure_file(cmake/nibble-static.pc.in ${PROJECT_BINARY_DIR}/nibble-static.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/nibble-static.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)

if(TARGET nibble-cli)
  install(TARGETS nibble-cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  set(generated ${PROJECT_BINARY_DIR}/generated)  # by the tool itself, when it is linked
  install(FILES ${generated}/nibble.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT tools)
  install(FILES ${generated}/nibble.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME nibble
          COMPONENT tools)
  foreach(functions site-functions vendor-completions)  # where zsh looks for others' files, and where Debian's does
    install(FILES ${generated}/_nibble DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/${functions} COMPONENT tools)
  endforeach()
  install(FILES ${generated}/nibble.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT tools)
endif()
