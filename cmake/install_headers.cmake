# SPDX-License-Identifier: Apache-2.0
# Runs when Weft is installed: copies include/weft, and the headers of the tree that those include
# directly or indirectly, from the folder ${source} to ${destination} below the prefix. Other
# headers are left out, because libweft.so exports none of their symbols.
file(GLOB left RELATIVE "${source}/include" "${source}/include/weft/*.h")
set(seen ${left})
while(left)
  list(POP_FRONT left header)
  set(file "${source}/include/${header}")
  if(NOT EXISTS "${file}")
    string(REGEX REPLACE "^weft/" "${source}/" file "${header}")
  endif()
  cmake_path(GET header PARENT_PATH folder)
  file(INSTALL "${file}" DESTINATION "${CMAKE_INSTALL_PREFIX}/${destination}/${folder}")
  file(STRINGS "${file}" includes REGEX "^#include <weft/")
  list(TRANSFORM includes REPLACE "^#include <(weft/[^>]+)>.*" "\\1")
  list(REMOVE_ITEM includes ${seen})
  list(REMOVE_DUPLICATES includes)
  list(APPEND seen ${includes})
  list(APPEND left ${includes})
endwhile()
