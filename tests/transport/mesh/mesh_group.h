// SPDX-License-Identifier: Apache-2.0
// The ranks of a mesh, driven by the test's thread; and the connections between them, whose
// directions a test can hold.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <weft/tests/transport/mesh/mesh_ranks.h>
#include <weft/transport/inproc/faults.h>

namespace weft::transport::mesh {

// The test's thread calls the communicators.
class Group {
 public:
  explicit Group(int ranks,
                 const std::function<std::shared_ptr<Communicator>(const JoinOptions& options)>&
                     join = join_inproc)
      : communicators(static_cast<std::size_t>(ranks)) {
    const auto store = std::make_shared<harness::MemoryBootstrap>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      const JoinOptions options = options_of(rank, ranks, store);
      loops.push_back(options.loop);
      threads.emplace_back([this, rank, options, &join] {
        try {
          communicators[static_cast<std::size_t>(rank)] = join(options);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    settle();
  }

  PointToPoint& messages(std::size_t rank) { return *communicators[rank]->point_to_point(); }
  // Returns when the loops have handled everything that has happened.
  void settle() const {
    for (int round = 0; round < 8; ++round) {
      for (const auto& loop : loops) {
        const auto turned = std::make_shared<LoopFlag>(loop);
        loop->post([turned] { turned->raise(); });
        EXPECT_TRUE(turned->synchronize(soon()));
      }
    }
  }

  std::vector<std::shared_ptr<EventLoop>> loops;
  std::vector<std::shared_ptr<Communicator>> communicators;
};

// Both directions of the connections over inproc that are made while it lives, two for each
// connection: first that from its maker.
class Links {
 public:
  explicit Links(bool held) : held_(held) {
    inproc::on_link([this](const inproc::Faults& there, const inproc::Faults& back) {
      std::lock_guard lock(mutex_);
      if (held_) {
        there.hold_at(0);
        back.hold_at(0);
      }
      ways_.push_back(there);
      ways_.push_back(back);
    });
  }
  ~Links() { inproc::on_link({}); }
  std::size_t made() {
    std::lock_guard lock(mutex_);
    return ways_.size() / 2;
  }
  inproc::Faults way(std::size_t index) {
    std::lock_guard lock(mutex_);
    return ways_.at(index);
  }
  // Whether connections that are made from now on are held.
  void hold_new(bool held) {
    std::lock_guard lock(mutex_);
    held_ = held;
  }
  // Holds the bytes that are written from now on, on these connections and on new ones.
  void hold() {
    std::lock_guard lock(mutex_);
    held_ = true;
    for (const inproc::Faults& way : ways_) way.hold_at(way.written());
  }
  void release() {
    std::lock_guard lock(mutex_);
    held_ = false;
    for (const inproc::Faults& way : ways_) way.release();
  }

 private:
  std::mutex mutex_;
  bool held_;
  std::vector<inproc::Faults> ways_;
};

}  // namespace weft::transport::mesh
