# Read by ctest, once for each executable of tests (executable, labels, timeout are set): one of ctest's tests for each suite
# and setting instead of one for each test. Under a sanitizer a process starts in a second, longer than most tests run.
get_filename_component(program "${executable}" NAME)
if(NOT EXISTS "${executable}")
  add_test("${program}_NOT_BUILT" "${program}_NOT_BUILT")
  return()
endif()
execute_process(COMMAND "${executable}" --gtest_list_tests OUTPUT_VARIABLE listed RESULT_VARIABLE result ERROR_VARIABLE said)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${executable} --gtest_list_tests: ${result}\n${said}")
endif()
set(groups)
string(REGEX REPLACE "[ ]*#[^\n]*" "" listed "${listed}")  # what parameters are
string(REPLACE "\n" ";" lines "${listed}")
foreach(line IN LISTS lines)
  if(line MATCHES "^([^ ].*\\.)$")
    set(suite "${CMAKE_MATCH_1}")
  elseif(line MATCHES "^  [^/]+(/.+)?$")
    set(group "${suite}*${CMAKE_MATCH_1}")
    list(APPEND groups "${group}")
    math(EXPR "count_${group}" "${count_${group}} + 1")
  endif()
endforeach()
list(REMOVE_DUPLICATES groups)
foreach(group IN LISTS groups)
  math(EXPR limit "${timeout} + 15 * ${count_${group}}")
  math(EXPR processors "1 + ${count_${group}} / 40")  # large ones take gigabytes under tsan: not two at a time
  unset("count_${group}")  # the next executable may have a suite of that name
  set(name "${program} ${group}")
  add_test("${name}" "${executable}" "--gtest_filter=${group}")
  set_tests_properties("${name}" PROPERTIES TIMEOUT "${limit}" PROCESSORS "${processors}" LABELS "${labels}"
    SKIP_REGULAR_EXPRESSION "\\[  PASSED  \\] 0 tests\\.")
endforeach()
