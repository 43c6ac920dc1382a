// SPDX-License-Identifier: Apache-2.0
// Prints the stack of each thread of this process, to diagnose hangs. It prints addresses;
// addr2line -Cfie PROGRAM translates them to names.
#pragma once

namespace weft::harness {

// Call once, before print_stacks(): does the steps that a signal handler must not be the first to
// do.
void prepare_stacks();
// Prints all stacks to stderr, with only the number of a thread that does not react to a signal for
// a moment. Call it from a signal handler.
void print_stacks();

}  // namespace weft::harness
