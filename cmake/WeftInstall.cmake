# cmake --install: libraries, headers and the programs, so that a user's find_package(weft) gives the target weft::weft.
include(CMakePackageConfigHelpers)

# Neither tests nor examples, for ./dev install.
add_custom_target(installed)

get_property(libraries GLOBAL PROPERTY WEFT_LIBRARIES)
add_dependencies(installed ${libraries} weft-run weft-agent weft-info weft-debug weft-timeline)
install(TARGETS ${libraries} weft EXPORT weft FILE_SET headers DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# These find the libtorch that they were built with.
cmake_path(GET Libtorch_CPU_LIBRARY PARENT_PATH folder)
set_target_properties(weft-agent weft-info PROPERTIES INSTALL_RPATH "${folder}")
install(TARGETS weft-run weft-agent weft-info weft-debug weft-timeline DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/weft" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT weft NAMESPACE weft:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/weft FILE weftTargets.cmake)
set(weft_cuda_headers "")
if(WEFT_CUDA)
  list(GET CUDAToolkit_INCLUDE_DIRS 0 weft_cuda_headers)
endif()
configure_package_config_file(cmake/weftConfig.cmake.in "${PROJECT_BINARY_DIR}/weftConfig.cmake"
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/weft PATH_VARS CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/weftConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/weftConfig.cmake" "${PROJECT_BINARY_DIR}/weftConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake" DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/weft)
