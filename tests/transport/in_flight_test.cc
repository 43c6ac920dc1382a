// SPDX-License-Identifier: Apache-2.0
// When operations under way are polled, and for how long. Their fences are flags that the test
// raises.
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <weft/cuda/poll.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/transport/in_flight.h>

namespace weft::transport {
namespace {

using std::chrono::microseconds;

bool comes_true(const std::function<bool()>& what) {
  return cuda::poll_until(what, Deadline::in(std::chrono::seconds(30)));
}

// Spins, since a sleep would end some 50 µs late.
void spin(microseconds time) {
  const auto end = Deadline::Clock::now() + time;
  while (Deadline::Clock::now() < end) {
  }
}

class InFlightOperations : public cuda::FakeCuda {
 protected:
  struct Owner {
    Owner(const std::shared_ptr<cuda::Device>& device, const std::shared_ptr<EventLoop>& loop,
          microseconds looks)
        : flight(device, loop, {}, looks) {}
    InFlight flight;
  };
  struct Begun {
    Op op;
    std::shared_ptr<HostFlag> done;
    std::weak_ptr<const void> pin;
  };

  std::shared_ptr<Owner> make_owner(microseconds between_looks = InFlight::kBetweenLooks) {
    return std::make_shared<Owner>(device, loop, between_looks);
  }

  static Begun begin(const std::shared_ptr<Owner>& owner, bool in_line = false,
                     bool has_passed = false) {
    const auto done = std::make_shared<HostFlag>();
    if (has_passed) done->raise();
    Pin pin = std::make_shared<int>();
    const std::weak_ptr<const void> held = pin;
    const Completion completion(pin, Fence(done));
    owner->flight.add({"operation", completion, std::move(pin), Fence(), Fence(done), in_line},
                      owner);
    return {completion.op(), done, held};
  }

  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("test");
};

// The loop stops polling some 100 µs after the last operation: operations are issued before, at and
// after that moment.
TEST_F(InFlightOperations, EndWheneverTheyAreIssued) {
  const auto owner = make_owner();
  for (int round = 0; round < 1000; ++round) {
    spin(microseconds(round * 7 % 250));
    std::vector<Begun> begun;
    for (int i = 0; i <= round % 3; ++i) begun.push_back(begin(owner));
    for (const Begun& one : begun) {
      EXPECT_FALSE(one.op.ended());
      one.done->raise();
    }
    for (const Begun& one : begun) {
      ASSERT_TRUE(comes_true([&] { return one.op.ended() && one.pin.expired(); }))
          << "not polled in round " << round;
      EXPECT_FALSE(one.op.error());
    }
  }
}

TEST_F(InFlightOperations, KeepTheirOwnerUntilTheLastEnds) {
  for (int round = 0; round < 200; ++round) {
    auto owner = make_owner();
    const std::weak_ptr<Owner> seen = owner;
    const Begun first = begin(owner), second = begin(owner);
    first.done->raise();
    owner.reset();
    ASSERT_TRUE(comes_true([&] { return first.op.ended(); }));
    EXPECT_FALSE(seen.expired());
    second.done->raise();
    ASSERT_TRUE(comes_true([&] { return seen.expired(); })) << round;
    EXPECT_TRUE(second.op.ended());
    EXPECT_FALSE(second.op.error());
  }
}

TEST_F(InFlightOperations, OwnerMayGoAnyTimeAfterTheLast) {
  for (int round = 0; round < 500; ++round) {
    auto owner = make_owner();
    const std::weak_ptr<Owner> seen = owner;
    const Begun one = begin(owner);
    one.done->raise();
    ASSERT_TRUE(comes_true([&] { return one.op.ended(); }));
    spin(microseconds(round % 200));
    owner.reset();
    ASSERT_TRUE(comes_true([&] { return seen.expired(); })) << round;
  }
}

// The loop ends between two polls.
TEST_F(InFlightOperations, PassedOnesSucceedWhenTheLoopEnds) {
  auto owner = make_owner(std::chrono::minutes(10));
  const Begun first = begin(owner, /*in_line=*/false, /*has_passed=*/true);
  ASSERT_TRUE(comes_true([&] { return first.op.ended(); }));  // the only poll
  const Begun one = begin(owner);
  EXPECT_FALSE(owner->flight.passed());
  one.done->raise();
  EXPECT_TRUE(owner->flight.passed());
  EXPECT_FALSE(one.op.ended());
  owner.reset();
  loop.reset();
  EXPECT_TRUE(one.op.ended());
  EXPECT_FALSE(one.op.error());
  EXPECT_TRUE(one.pin.expired());
}

// Each query would ask the driver and take its locks.
TEST_F(InFlightOperations, OrderedOnesAreNotAllQueried) {
  class CountingFlag final : public HostFlag {
   public:
    explicit CountingFlag(std::atomic<int>& questions) : questions_(questions) {}
    bool query() const noexcept override {
      ++questions_;
      return HostFlag::query();
    }

   private:
    std::atomic<int>& questions_;
  };
  constexpr std::size_t kOperations = 64,
                        kMostQuestions = 8;  // the first, the last, then a binary search
  for (std::size_t passed = 0; passed <= kOperations; ++passed) {
    std::atomic<int> questions{0};
    std::vector<std::shared_ptr<HostFlag>> flags;
    for (std::size_t i = 0; i < kOperations; ++i) {
      flags.push_back(std::make_shared<CountingFlag>(questions));
      if (i < passed) flags.back()->raise();
    }
    questions = 0;  // raise() queries too
    std::vector<Op> ops;
    auto owner =
        make_owner(std::chrono::minutes(10));  // the loop polls once, after the posted work
    loop->post([&] {
      for (const auto& flag : flags) {
        const Completion completion(nullptr, Fence(flag));
        ops.push_back(completion.op());
        owner->flight.add(
            {.name = "operation", .completion = completion, .done = Fence(flag), .is_behind = true},
            owner);
      }
    });
    std::atomic<bool> looked{false};
    ASSERT_TRUE(comes_true([&] { return questions > 0; }));
    loop->post([&] { looked = true; });  // runs in a turn after that of the poll
    ASSERT_TRUE(comes_true([&] { return looked.load(); }));
    for (std::size_t i = 0; i < kOperations; ++i)
      EXPECT_EQ(ops[i].ended(), i < passed) << i << " of " << passed;
    EXPECT_LE(questions, kMostQuestions) << passed << " have passed";
    for (const auto& flag : flags) flag->raise();
    owner.reset();
    loop = std::make_shared<EventLoop>("test");
  }
}

TEST_F(InFlightOperations, QueuedOnesAreQueriedEveryTurn) {
  const auto owner = make_owner(std::chrono::minutes(10));
  const Begun waits = begin(owner, /*in_line=*/true);
  spin(microseconds(300));
  waits.done->raise();
  EXPECT_TRUE(comes_true([&] { return waits.op.ended(); }));
}

TEST_F(InFlightOperations, PendingOnesFailWhenTheLoopEnds) {
  auto owner = make_owner();
  const std::weak_ptr<Owner> seen = owner;
  const Begun one = begin(owner);
  owner.reset();
  loop.reset();
  ASSERT_TRUE(seen.expired());
  ASSERT_TRUE(one.op.error());
  EXPECT_EQ(one.op.error()->blame(), Blame::Cancelled);
  EXPECT_FALSE(one.pin.expired()) << "released although its memory may be in use";
  one.done->raise();
  EXPECT_TRUE(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(30))));
  EXPECT_TRUE(one.pin.expired());
}

}  // namespace
}  // namespace weft::transport
