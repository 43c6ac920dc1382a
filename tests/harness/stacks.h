// Where each thread of this process stands, for who hangs: addresses, which addr2line -Cfie PROGRAM
// gives the names of.
#pragma once

namespace weft::harness {

// Once, before print_stacks(): what a signal's handler must not be the first to do.
void prepare_stacks();
// To stderr; a thread that takes no signal within a moment is named alone. To be called from a
// signal's handler.
void print_stacks();

}  // namespace weft::harness
