# SPDX-License-Identifier: Apache-2.0
# The functions with which every folder declares its targets.

# Sources write #include <weft/cuda/stream.h>. In the tree, this link to the root resolves it, and
# include/ the public headers (<weft/group.h>). After an install, both are under include/weft.
file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/include")
file(CREATE_LINK "${PROJECT_SOURCE_DIR}" "${PROJECT_BINARY_DIR}/include/weft" SYMBOLIC)

# Warnings, sanitizers, tracing and the form of paths in messages, for Weft's own sources only.
add_library(weft_flags INTERFACE)
target_compile_features(weft_flags INTERFACE cxx_std_20)
# Set for all targets, so that they can share precompiled headers.
if(WEFT_TRACE)
  target_compile_definitions(weft_flags INTERFACE WEFT_TRACE_ENABLED=1)
endif()
target_compile_options(weft_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wnon-virtual-dtor;-Wno-missing-field-initializers>"
  "$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=;-ffile-prefix-map=${PROJECT_BINARY_DIR}/include/weft/=>"
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${WEFT_WARNINGS_AS_ERRORS}>>:-Werror>")
# Clang checks the annotations of base/mutex.h.
target_compile_options(weft_flags INTERFACE
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>>:-Wthread-safety>")
# Clang warns about a deprecated function that libstdc++ 12 itself calls in std::stable_sort and
# similar functions; g++ does not.
target_compile_options(weft_flags INTERFACE
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>>:-Wno-deprecated-declarations>")
# g++ warns about a WEFT_API class with a member of a hidden type; users of the class never see that
# type.
target_compile_options(weft_flags INTERFACE "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-attributes>")
# Without this, g++ runs its garbage collector again and again while it reads libtorch.
target_compile_options(weft_flags INTERFACE
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:SHELL:--param ggc-min-heapsize=1000000>")
if(WEFT_SANITIZE)
  target_compile_options(weft_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${WEFT_SANITIZE};-fno-omit-frame-pointer;-g1>")
  # Turns off two checks that clang adds to undefined. The first reports the fakes of NCCL's and
  # CUDA's functions, because it takes them for other functions. The second opens a pipe at each
  # check, and reports valid objects if no descriptor is left.
  target_compile_options(weft_flags INTERFACE
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>>:-fno-sanitize=function,vptr>")
  target_link_options(weft_flags INTERFACE "-fsanitize=${WEFT_SANITIZE}")
endif()

# Precompiled once for each library, and once for all tests without libtorch. Sources still include
# the headers that they use: the preset "optimized" compiles each header alone.
set(WEFT_STANDARD_HEADERS
  <algorithm> <array> <atomic> <chrono> <condition_variable> <cstdint> <cstring> <deque> <exception> <functional> <map> <memory> <mutex>
  <optional> <set> <span> <sstream> <string> <string_view> <thread> <tuple> <type_traits> <unordered_map> <unordered_set> <utility>
  <variant> <vector>)
# Without this, clang stores the time in a precompiled header, and ccache does not recognise it when
# it is built again.
target_compile_options(weft_flags INTERFACE
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>>:SHELL:-Xclang -fno-pch-timestamp>")

# weft_library(<name> SOURCES … HEADERS … [LINKS …] [PRIVATE_LINKS …]): one layer's archive, target
# weft::<name>. Tests link these archives; users link weft::weft, which contains the objects of all
# layers (engine/CMakeLists.txt).
function(weft_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;HEADERS;LINKS;PRIVATE_LINKS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "weft_library(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  add_library(weft_${name} STATIC ${arg_SOURCES})
  add_library(weft::${name} ALIAS weft_${name})
  file(RELATIVE_PATH folder "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
  list(TRANSFORM arg_HEADERS PREPEND "${PROJECT_BINARY_DIR}/include/weft/${folder}/")
  target_sources(weft_${name} PUBLIC FILE_SET headers TYPE HEADERS
    BASE_DIRS "${PROJECT_BINARY_DIR}/include" FILES ${arg_HEADERS})
  target_include_directories(weft_${name} PUBLIC "${PROJECT_SOURCE_DIR}/include")
  target_compile_features(weft_${name} PUBLIC cxx_std_20)
  target_link_libraries(weft_${name} PUBLIC ${arg_LINKS} PRIVATE ${arg_PRIVATE_LINKS} weft_flags)
  target_precompile_headers(weft_${name} PRIVATE ${WEFT_STANDARD_HEADERS})
  set_target_properties(weft_${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  set_property(GLOBAL APPEND PROPERTY WEFT_LIBRARIES weft_${name})
endfunction()

# weft_program(<name> SOURCES … LINKS …): a program in the build's bin/.
function(weft_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LINKS")
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINKS} weft_flags)
  # A layer's archive names libraries that only some of its objects need.
  target_link_options(${name} PRIVATE LINKER:--as-needed)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
endfunction()
