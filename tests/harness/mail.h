// SPDX-License-Identifier: Apache-2.0
// Tools for tests of connections: distinguishable patterns of bytes, and a Mailbox that keeps
// received messages.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <weft/base/event_loop.h>
#include <weft/transport/connection.h>

namespace weft::harness {

// How long a test waits for something that must happen. WEFT_TEST_PATIENCE_S makes it longer where
// packets are lost (tests/guest).
inline std::chrono::seconds longest_wait() {
  const char* const given = std::getenv("WEFT_TEST_PATIENCE_S");
  return std::chrono::seconds(given == nullptr ? 60 : std::atoi(given));
}
inline Deadline patience() { return Deadline::in(longest_wait()); }

// Returns bytes that differ between seeds, and between positions of one seed.
inline std::vector<std::byte> pattern(std::uint32_t seed, std::size_t bytes) {
  std::vector<std::byte> result(bytes);
  std::uint64_t state = (std::uint64_t{seed} + 1) * 0x9e3779b97f4a7c15u;
  for (std::size_t at = 0; at < bytes; at += sizeof state) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const std::uint64_t mixed = state ^ (state >> 33);
    std::memcpy(&result[at], &mixed, std::min(sizeof mixed, bytes - at));
  }
  return result;
}

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

inline Slice slice_of(const std::vector<std::byte>& bytes) {
  return {const_cast<std::byte*>(bytes.data()), bytes.size(), Device::host()};
}

struct Letter {
  std::string header;
  std::vector<std::vector<std::byte>> payloads;
  bool was_in_place = false;
};

// Receives all messages of a connection and keeps them. Its functions are for the test's thread,
// which turns the loop while it waits.
class Mailbox {
 public:
  Mailbox(transport::Connection& connection, std::shared_ptr<EventLoop> loop)
      : loop_(std::move(loop)) {
    connection.receive({[kept = kept_, &connection](const transport::Arrival& arrival) {
                          keep(kept, connection, arrival);
                        },
                        [kept = kept_](const Error& error) {
                          std::lock_guard lock(kept->mutex);
                          ++kept->closings;
                          kept->closed = error;
                        }});
  }

  // Returns the next letter. Fails the test if none arrives.
  Letter next() {
    const bool came = loop_->drive([this] { return count() > taken_ || closed(); }, patience());
    std::lock_guard lock(kept_->mutex);
    if (!came || kept_->whole.size() <= taken_) {
      ADD_FAILURE() << "no letter came"
                    << (kept_->closed ? std::string(": ") + kept_->closed->what() : "");
      return {};
    }
    return std::move(*kept_->whole[taken_++]);
  }
  // Blocks until the connection has ended; returns its error.
  Error wait_closed() {
    EXPECT_TRUE(loop_->drive([this] { return closed().has_value(); }, patience()))
        << "the connection does not end";
    return closed().value_or(Error(Blame::Cancelled, "the connection has not ended"));
  }
  std::optional<Error> closed() const {
    std::lock_guard lock(kept_->mutex);
    return kept_->closed;
  }
  int closings() const {
    std::lock_guard lock(kept_->mutex);
    return kept_->closings;
  }
  // Returns how many letters have arrived completely, including taken ones.
  std::size_t count() const {
    std::lock_guard lock(kept_->mutex);
    return kept_->whole.size();
  }

 private:
  struct Kept {
    std::mutex mutex;
    std::vector<std::shared_ptr<Letter>> whole;
    std::optional<Error> closed;
    int closings = 0;
  };

  static void keep(const std::shared_ptr<Kept>& kept, transport::Connection& connection,
                   const transport::Arrival& arrival) {
    const auto letter = std::make_shared<Letter>();
    letter->header.assign(reinterpret_cast<const char*>(arrival.header.data()),
                          arrival.header.size());
    letter->was_in_place = !arrival.in_place.empty();
    std::vector<Slice> destinations;
    for (const std::uint64_t size : arrival.sizes) {
      letter->payloads.emplace_back(static_cast<std::size_t>(size));
      destinations.push_back(slice_of(letter->payloads.back()));
    }
    const Op op = connection.accept(destinations, letter, {});
    op.on_ended([kept, letter, op] {
      if (op.error()) return;
      std::lock_guard lock(kept->mutex);
      kept->whole.push_back(letter);
    });
  }

  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Kept> kept_ = std::make_shared<Kept>();
  std::size_t taken_ = 0;
};

// Returns the error of an operation, which must end and must have failed.
inline Error failure_of(const Op& op) {
  EXPECT_TRUE(op.done().synchronize(patience())) << "an operation does not end";
  const auto error = op.error();
  EXPECT_TRUE(error) << "an operation that should have failed did not";
  return error.value_or(Error(Blame::Cancelled, "no error"));
}

inline void expect_good(const Op& op) {
  EXPECT_TRUE(op.done().synchronize(patience())) << "an operation does not end";
  if (const auto error = op.error()) ADD_FAILURE() << error->what();
}

}  // namespace weft::harness
