# find_package(nibble) gives nibble::nibble.
include(CMakePackageConfigHelpers)

install(TARGETS nibble EXPORT nibbleTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/nibble ${PROJECT_BINARY_DIR}/include/nibble DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
if(TARGET nibble-cli)
  install(TARGETS nibble-cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/nibble)
install(EXPORT nibbleTargets NAMESPACE nibble:: DESTINATION ${package_dir})
configure_package_config_file(cmake/nibbleConfig.cmake.in ${PROJECT_BINARY_DIR}/nibbleConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/nibbleConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/nibbleConfig.cmake ${PROJECT_BINARY_DIR}/nibbleConfigVersion.cmake
        DESTINATION ${package_dir})
