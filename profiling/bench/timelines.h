// SPDX-License-Identifier: Apache-2.0
// Helpers for runs of programs with a timeline.
#pragma once

#include <string>

namespace weft::bench {

// All of these end the bench with a message if they fail.

// The path of a program of the same build, in the folder of this one.
std::string beside(const std::string& program);
// Makes a new folder for files; the bench removes it.
std::string new_folder();
// The percentage of rank 0's steps in which communication was not hidden. Leaves out the last step,
// which reaches to the end of the program.
double exposed_in(const std::string& timeline);

}  // namespace weft::bench
