// Runs of programs with a timeline, and what it says of them.
#pragma once

#include <string>

namespace weft::bench {

// All of these end the bench with a message where that is not possible.

// A program of the same build, which stands beside this one.
std::string beside(const std::string& program);
// A folder of its own for files that the bench removes.
std::string new_folder();
// The share of rank 0's steps in which communication was not hidden, percent; the last step reaches
// to the end of the program and does not count.
double exposed_in(const std::string& timeline);

}  // namespace weft::bench
