// SPDX-License-Identifier: Apache-2.0
// Reads memory of the process at the other end of a connection (process_vm_readv). Each process
// shows the other a proof: random bytes in its own memory. A read counts only if the same call also
// finds the proof: a process that has got the peer's number after its death, or another program
// that the peer has become, does not have it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <sys/types.h>

namespace weft::transport::shm {

using Proof = std::array<std::uint64_t, 2>;
Proof make_proof() noexcept;

// On a system that lets a process read only its descendants' memory (Yama), allows the processes
// that this one's parent has started to read this one's. Has an effect once in a process.
void let_siblings_read() noexcept;

class PeerMemory {
 public:
  // `address` is the proof's, in the peer's memory.
  PeerMemory(pid_t process, std::uint64_t address, const Proof& proof)
      : process_(process), address_(address), proof_(proof) {}

  // Copies the peer's bytes at `from` to `to`, which is not empty. Returns 0, or an errno if it did
  // not copy all of them or did not find the proof (ESRCH); `to` may then hold anything. An address
  // that is not valid is EFAULT.
  int read(std::uint64_t from, std::span<std::byte> to) const noexcept;
  // Reads only the proof.
  int try_to_read() const noexcept;

 private:
  pid_t process_;
  std::uint64_t address_;
  Proof proof_;
};

}  // namespace weft::transport::shm
