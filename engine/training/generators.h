// SPDX-License-Identifier: Apache-2.0
// States of libtorch's default random number generators, and seeds that depend on a name. A process
// has one generator for each device: while one thread sets a state and draws, others must not draw.
// Nothing here blocks for long.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace weft::training {

// The states of the CPU's generator, and of those of the GPUs among some devices.
class GeneratorStates {
 public:
  // Copies the present states.
  explicit GeneratorStates(const std::vector<c10::Device>& devices);
  void restore() const;

 private:
  std::vector<std::pair<c10::Device, at::Tensor>> states_;
};

// While it lives, the generators are seeded; it restores their states.
class SeededGenerators {
 public:
  SeededGenerators(const std::vector<c10::Device>& devices, std::uint64_t seed);
  ~SeededGenerators() { before_.restore(); }
  SeededGenerators(const SeededGenerators&) = delete;
  SeededGenerators& operator=(const SeededGenerators&) = delete;

 private:
  const GeneratorStates before_;
};

// A seed for that part of what the program has seeded; the same on all machines.
std::uint64_t seed_of(std::uint64_t seed, const std::string& name);

}  // namespace weft::training
