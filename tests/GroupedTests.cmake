# Read by ctest, once for each executable of tests (executable, labels, timeout, prefix, alone, sanitized are set): one of ctest's
# tests for each suite and setting. A process with libtorch starts in half a second, under a sanitizer in one, longer than most
# tests run; what a crash takes with it is run again by itself (./dev test). One of ctest's tests for each of gtest's where they
# must be alone, and with WEFT_EACH_TEST in the environment, as ./dev test -R has it: names of single tests are matched then.
get_filename_component(program "${executable}" NAME)
if(NOT EXISTS "${executable}")
  add_test("${program}_NOT_BUILT" "${program}_NOT_BUILT")
  return()
endif()
set(list "${executable}_tests$ENV{WEFT_ALL_SETTINGS}.txt")  # programs list fewer settings without that variable
if(NOT EXISTS "${list}" OR "${executable}" IS_NEWER_THAN "${list}")
  execute_process(COMMAND "${executable}" --gtest_list_tests OUTPUT_VARIABLE listed RESULT_VARIABLE result ERROR_VARIABLE said)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${executable} --gtest_list_tests: ${result}\n${said}")
  endif()
  file(WRITE "${list}" "${listed}")
endif()
file(READ "${list}" listed)
set(groups)
string(REGEX REPLACE "[ ]*#[^\n]*" "" listed "${listed}")  # what parameters are
string(REPLACE "\n" ";" lines "${listed}")
foreach(line IN LISTS lines)
  if(line MATCHES "^([^ ].*\\.)$")
    set(suite "${CMAKE_MATCH_1}")
  elseif(line MATCHES "^  ([^/]+)(/.+)?$")
    if(alone OR DEFINED ENV{WEFT_EACH_TEST})
      set(group "${suite}${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    else()
      set(group "${suite}*${CMAKE_MATCH_2}")
    endif()
    list(APPEND groups "${group}")
    math(EXPR "count_${group}" "${count_${group}} + 1")
  endif()
endforeach()
list(REMOVE_DUPLICATES groups)
# To its end: where some failed, and none passed, ctest would call it a skip all the same.
set(only_skipped "\\[  PASSED  \\] 0 tests\\.\n\\[  SKIPPED \\] [0-9]+ tests?, listed below:\n(\\[  SKIPPED \\] [^\n]*\n?)+$")
foreach(group IN LISTS groups)
  set(count "${count_${group}}")
  unset("count_${group}")  # the next executable may have a suite of that name
  math(EXPR limit "${timeout} + 15 * (${count} - 1)")
  set(processors 1)
  if(sanitized)
    math(EXPR processors "1 + ${count} / 40")  # large ones take gigabytes under tsan: not two at a time
  endif()
  set(name "${prefix}${group}")
  if(group MATCHES "\\*")
    set(name "${program} ${prefix}${group}")
  endif()
  add_test("${name}" "${executable}" "--gtest_filter=${group}")
  set_tests_properties("${name}" PROPERTIES TIMEOUT "${limit}" PROCESSORS "${processors}" LABELS "${labels}" COST "${count}"
    SKIP_REGULAR_EXPRESSION "${only_skipped}" FAIL_REGULAR_EXPRESSION "Running 0 tests from")
endforeach()
