// SPDX-License-Identifier: Apache-2.0
// One worker of a test in which all use each other's references at random.
#pragma once

#include <deque>
#include <random>
#include <string>

#include <weft/tests/engine/rpc/refs.h>

namespace weft::harness {

class RandomUser {
 public:
  // The workers are "worker0" … "worker<workers - 1>". A step may fail with errors for which
  // `may_fail` is true.
  RandomUser(rpc::Agent& agent, int workers, int seed, std::function<bool(const Error&)> may_fail)
      : agent_(agent),
        workers_(workers),
        may_fail_(std::move(may_fail)),
        random_(static_cast<unsigned>(seed)) {}

  void step() {
    ++steps_;
    try {
      someones_step();
    } catch (const Error& failed) {
      ++failed_;
      EXPECT_TRUE(may_fail_(failed)) << failed.what();
    }
  }
  void drop() { kept_.clear(); }
  int failed() const { return failed_; }
  int steps() const { return steps_; }

 private:
  int upto(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit + 1)); }
  rpc::Destination someone() {
    const int rank = upto(workers_ - 1);
    return upto(1) == 0 ? rpc::Destination(rank)
                        : rpc::Destination("worker" + std::to_string(rank));
  }
  void keep(RRef<int> reference) {
    kept_.push_back(std::move(reference));
    while (kept_.size() > 10) kept_.pop_front();
  }
  void someones_step() {
    const int value = upto(1000);
    switch (upto(5)) {
      case 0: keep(agent_.remote<&refs::number>(someone(), value)); break;
      case 1: {
        const auto third = agent_.worker(someone());
        const auto made = agent_.sync<&refs::make_on>(someone(), third, value);
        keep(made);
        EXPECT_EQ(made.to_here(), value);
        break;
      }
      case 2:
        if (!kept_.empty()) keep(agent_.sync<&refs::give_back>(someone(), kept_.front()));
        break;
      case 3: {
        const RRef<int> mine(agent_, 1);
        const auto theirs = agent_.remote<&refs::number>(someone(), value);
        EXPECT_EQ(agent_.sync<&refs::fetch_sum>(someone(), theirs, mine), value + 1);
        break;
      }
      case 4: {
        RRef<int> chain = agent_.remote<&refs::number>(someone(), value);
        for (int i = 0; i < 4; ++i) {
          const auto next = someone();
          chain =
              agent_.remote<&refs::plus_held>(next, upto(1) == 0 ? chain : chain.copy_to(next), 1);
        }
        EXPECT_EQ(chain.to_here(), value + 4);
        break;
      }
      default: {
        const auto account = agent_.remote<refs::Account>(someone(), value);
        EXPECT_EQ(account.sync<&refs::Account::add>(2), value + 2);
      }
    }
  }

  rpc::Agent& agent_;
  const int workers_;
  const std::function<bool(const Error&)> may_fail_;
  std::mt19937 random_;
  std::deque<RRef<int>> kept_;
  int failed_ = 0;
  int steps_ = 0;
};

}  // namespace weft::harness
