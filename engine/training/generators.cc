// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <weft/engine/codec/digest.h>
#include <weft/engine/training/generators.h>

namespace weft::training {

namespace {

std::vector<c10::Device> with_generators(const std::vector<c10::Device>& devices) {
  std::vector<c10::Device> all = {c10::Device(c10::kCPU)};
  for (const c10::Device device : devices) {
    if (device.is_cuda() && std::ranges::find(all, device) == all.end()) all.push_back(device);
  }
  return all;
}

}  // namespace

GeneratorStates::GeneratorStates(const std::vector<c10::Device>& devices) {
  for (const c10::Device device : with_generators(devices)) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(device, generator.get_state());
  }
}

void GeneratorStates::restore() const {
  for (const auto& [device, state] : states_) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

SeededGenerators::SeededGenerators(const std::vector<c10::Device>& devices, std::uint64_t seed)
    : before_(devices) {
  for (const c10::Device device : with_generators(devices)) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

std::uint64_t seed_of(std::uint64_t seed, const std::string& name) {
  codec::Digest digest;
  const std::string text = std::to_string(seed) + "/" + name;
  digest.add(text.data(), text.size());
  return std::stoull(digest.text().substr(0, 16), nullptr, 16);
}

}  // namespace weft::training
