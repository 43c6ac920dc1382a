// SPDX-License-Identifier: Apache-2.0
// Compiled with optimisation in all builds: the loops of xxhash.h are its own.
#include <cstdio>
#include <optional>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/checksum.h>
#include <weft/engine/codec/digest.h>

namespace weft::checkpoint {

namespace {

constexpr std::pair<Algorithm, std::string_view> kNames[] = {{Algorithm::Xxh3, "xxh3-128"},
                                                             {Algorithm::Sha256, "sha256"}};

}  // namespace

std::string_view name_of(Algorithm algorithm) {
  return algorithm == Algorithm::Xxh3 ? kNames[0].second : kNames[1].second;
}

Algorithm algorithm_of(std::string_view name) {
  for (const auto& [algorithm, own] : kNames) {
    if (own == name) return algorithm;
  }
  throw Error(Blame::Caller, "its checksums are of the kind '" + std::string(name) +
                                 "', which this Weft cannot compute");
}

// `sha256` if it is set, else XXH3.
struct Checksum::State {
  std::optional<codec::Digest> sha256;
  XXH3_state_t xxh3;
};

Checksum::Checksum(Algorithm algorithm) : state_(new State) {
  if (algorithm == Algorithm::Sha256) {
    state_->sha256.emplace();
  } else {
    XXH3_128bits_reset(&state_->xxh3);
  }
}
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;
Checksum::~Checksum() = default;

void Checksum::add(const void* data, std::size_t bytes) {
  if (state_->sha256) return state_->sha256->add(data, bytes);
  XXH3_128bits_update(&state_->xxh3, data, bytes);
}

std::string Checksum::text() {
  if (state_->sha256) return state_->sha256->text();
  XXH128_canonical_t raw;
  XXH128_canonicalFromHash(&raw, XXH3_128bits_digest(&state_->xxh3));
  std::string text;
  for (const unsigned char byte : raw.digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

std::string checksum_of(Algorithm algorithm, const void* data, std::size_t bytes) {
  Checksum checksum(algorithm);
  checksum.add(data, bytes);
  return checksum.text();
}

}  // namespace weft::checkpoint
