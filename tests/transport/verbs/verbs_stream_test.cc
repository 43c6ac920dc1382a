// SPDX-License-Identifier: Apache-2.0
// Whole verbs connections between fake devices, with memory of a fake GPU. The claims for
// connections are in tests/conformance/connection, which tests/guest runs over software RDMA.
#include <array>
#include <future>
#include <limits>

#include <poll.h>

#include <weft/cuda/ipc.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/harness/fake_verbs.h>
#include <weft/tests/harness/mail.h>
#include <weft/tests/transport/verbs/ends.h>
#include <weft/transport/inproc/faults.h>
#include <weft/transport/stream/stream_connection.h>
#include <weft/transport/verbs/alarm.h>
#include <weft/transport/verbs/verbs_stream.h>

namespace weft::transport::verbs {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr std::size_t kHeld = 1000;  // polls: more than the loop makes in a few turns

// Both ends on one loop; every access to the fake devices is made there.
class VerbsStreams : public cuda::FakeCuda {
 protected:
  VerbsStreams() : FakeCuda({.threads = true, .is_out_of_reach = true}) {
    verbs.look_through([this](const void* address) { return fake.behind(address); });
    auto meeting = inproc::make_streams();
    near = open(std::move(meeting.a), near_registrations);
    near_pair = verbs.newest_pair();
    far = open(std::move(meeting.b), far_registrations);
  }
  std::shared_ptr<Connection> open(std::unique_ptr<ByteStream> meeting,
                                   const std::shared_ptr<RegistrationCache>& registrations) const {
    auto met = connect_over(std::move(meeting), inproc::capabilities(), "inproc", loop);
    Capabilities capabilities;
    capabilities.direct_bytes = 128 << 10;
    capabilities.one_sided = true;
    return connect_over(
        std::make_unique<VerbsStream>(path, registrations, std::move(met), Deadline::never()),
        capabilities, "verbs", loop);
  }
  template <class Call>
  void on_loop(const Call& call) const {
    std::promise<void> made;
    loop->post([&] {
      call();
      made.set_value();
    });
    made.get_future().wait();
  }
  void TearDown() override {
    near.reset();
    far.reset();
    near_registrations.reset();
    far_registrations.reset();
    // Turns of the loop destroy every object that uses the fake devices.
    const auto is_gone = [this] {
      return is_stuck ? verbs.queue_pairs() == 1 : path.device.use_count() == 1;
    };
    EXPECT_TRUE(loop->drive(is_gone, harness::patience()));
    on_loop([] {});
    loop.reset();
    EXPECT_TRUE(device->retirement().reclaim_all(harness::patience()));
    FakeCuda::TearDown();
  }

  harness::FakeVerbs verbs;
  const Path path = verbs.path();
  std::shared_ptr<RegistrationCache> near_registrations =
      std::make_shared<RegistrationCache>(path.device);
  std::shared_ptr<RegistrationCache> far_registrations =
      std::make_shared<RegistrationCache>(path.device);
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("both");
  std::shared_ptr<Connection> near, far;
  std::uint32_t near_pair = 0;
  bool is_stuck = false;  // the objects that one queue pair needs stay
};

TEST_F(VerbsStreams, ClosingMidReceiveKeepsSentMessages) {
  std::vector<std::byte> place(1 << 20);
  Op sent;
  near->receive({[&](const Arrival&) {
                   verbs.hold(kHeld);
                   near->accept(std::array{harness::slice_of(place)}, nullptr, {});
                   loop->post([&] {  // by then the place has been named
                     sent = near->send(harness::bytes_of("the last word"), {}, nullptr, {});
                     near->close(Error(Blame::Cancelled, "enough"));
                   });
                 },
                 [](const Error&) {}});
  harness::Mailbox box(*far, loop);
  const auto payload = harness::pattern(1, place.size());
  on_loop([&] { far->send({}, std::array{harness::slice_of(payload)}, nullptr, {}); });
  EXPECT_EQ(box.next().header, "the last word");
  EXPECT_TRUE(sent.ended() && !sent.error());
  EXPECT_EQ(box.wait_closed().blame(), Blame::PeerLost);
}

TEST_F(VerbsStreams, ClosingMidPutKeepsSentMessages) {
  std::vector<std::byte> memory(1 << 20);
  const auto source = harness::pattern(2, memory.size());
  harness::Mailbox box(*far, loop);
  on_loop([&] { near->send(harness::bytes_of("hello"), {}, nullptr, {}); });
  EXPECT_EQ(box.next().header, "hello");
  std::shared_ptr<MemoryRegion> region;
  Op sent, put;
  on_loop([&] {
    region = far->one_sided()->expose(harness::slice_of(memory)).value();
    verbs.hold(kHeld);
    sent = near->send(harness::bytes_of("the last word"), {}, nullptr, {});
    put = near->one_sided()->put(harness::slice_of(source), region->key(), 0, nullptr, {});
    loop->post([&] { loop->post([&] { near->close(Error(Blame::Cancelled, "enough")); }); });
  });
  EXPECT_EQ(box.next().header, "the last word");
  EXPECT_TRUE(sent.ended() && !sent.error());
  box.wait_closed();
  region.reset();
}

TEST_F(VerbsStreams, PlaceTheDeviceStillUsesIsKept) {
  auto place = std::make_shared<std::vector<std::byte>>(1 << 20);
  const std::weak_ptr<const void> seen = place;
  const auto slice = harness::slice_of(*place);
  Op accepted;
  is_stuck = true;
  near->receive({[&](const Arrival&) {
                   verbs.hold(kHeld);
                   accepted = near->accept(std::array{slice}, std::exchange(place, nullptr), {});
                   loop->post([&] {
                     verbs.refuse_to_end(harness::FakeVerbs::Thing::QueuePair, EBUSY);
                     near->close(Error(Blame::Cancelled, "enough"));
                   });
                 },
                 [](const Error&) {}});
  harness::Mailbox box(*far, loop);
  const auto payload = harness::pattern(1, slice.bytes);
  on_loop([&] { far->send({}, std::array{harness::slice_of(payload)}, nullptr, {}); });
  box.wait_closed();
  EXPECT_EQ(harness::failure_of(accepted).blame(), Blame::Cancelled);
  EXPECT_FALSE(seen.expired());
  const auto said = take_logged();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_THAT(said[0], AllOf(HasSubstr("fake0: a queue pair cannot be destroyed"),
                             HasSubstr("is kept: Device or resource")));
}

// After the failure no work request completes, not even with an error.
TEST_F(VerbsStreams, FailedDeviceEndsItsConnections) {
  std::vector<std::byte> memory(1 << 20);
  const auto source = harness::pattern(3, memory.size());
  harness::Mailbox near_box(*near, loop), far_box(*far, loop);
  on_loop([&] { near->send(harness::bytes_of("hello"), {}, nullptr, {}); });
  EXPECT_EQ(far_box.next().header, "hello");
  std::shared_ptr<MemoryRegion> region;
  Op put;
  on_loop([&] {
    region = far->one_sided()->expose(harness::slice_of(memory)).value();
    verbs.hold(std::numeric_limits<std::size_t>::max());
    put = near->one_sided()->put(harness::slice_of(source), region->key(), 0, nullptr, {});
    verbs.say(IBV_EVENT_PORT_ERR);
    loop->post([&] { verbs.say(IBV_EVENT_DEVICE_FATAL); });
  });
  const Error failure = harness::failure_of(put);
  EXPECT_EQ(failure.blame(), Blame::Device) << failure.text();
  EXPECT_THAT(failure.text(), HasSubstr("fake0: an event"));
  EXPECT_EQ(near_box.wait_closed().blame(), Blame::Device);
  EXPECT_EQ(far_box.wait_closed().blame(), Blame::Device);
  EXPECT_EQ(verbs.unacknowledged(), 0u);
  EXPECT_THAT(take_logged(), testing::ElementsAre(HasSubstr("fake0:0: an event")));
  const Alarm late(path.device, nullptr, nullptr);
  pollfd rung{late.bell(), POLLIN, 0};
  EXPECT_EQ(::poll(&rung, 1, 0), 1) << "an alarm made after the failure must ring at once";
  region.reset();
}

TEST_F(VerbsStreams, FailedQueuePairEndsItsConnection) {
  harness::Mailbox near_box(*near, loop), far_box(*far, loop);
  on_loop([&] { near->send(harness::bytes_of("hello"), {}, nullptr, {}); });
  EXPECT_EQ(far_box.next().header, "hello");
  on_loop([&] { verbs.say(IBV_EVENT_QP_FATAL, near_pair); });
  EXPECT_EQ(near_box.wait_closed().blame(), Blame::Device);
  EXPECT_EQ(far_box.wait_closed().blame(), Blame::PeerLost);
  EXPECT_EQ(verbs.unacknowledged(), 0u);
}

// Its notes are valid: they repeat room that was announced before.
TEST_F(VerbsStreams, EndedPeersNotesDoNotHoldTheLoop) {
  auto meeting = inproc::make_streams();
  auto lane = open(std::move(meeting.a), near_registrations);
  const auto other = connect_over(std::move(meeting.b), inproc::capabilities(), "inproc", loop);
  std::optional<End> talker(verbs);
  std::uint32_t listener = 0;
  other->receive({[&](const Arrival& arrival) {
                    if (const auto hello = decode_hello(arrival.header)) {
                      listener = hello.value().queue_pair;
                      talker->pair.join(hello.value());
                      other->send(encode(talker->hello()), {}, nullptr, {});
                      other->send(harness::bytes_of("R"), {}, nullptr, {});
                    }
                    other->accept({}, nullptr, {});
                  },
                  [](const Error&) {}});
  std::promise<std::size_t> unsaid;
  lane->receive(
      {[](const Arrival&) {}, [&](const Error&) { unsaid.set_value(verbs.left_to_send()); }});
  for (bool has_opened = false; !has_opened;) on_loop([&] { has_opened = talker->turn(); });
  on_loop([&] {
    const auto room = encode(Note{.kind = Note::Kind::Room});
    verbs.go_on_sending(listener, room.data(), room.size(), 1'000'000);
    other->close(Error(Blame::Cancelled, "enough"));
  });
  EXPECT_GT(unsaid.get_future().get(), 0u);
  lane.reset();
  on_loop([&] { talker.reset(); });
}

TEST_F(VerbsStreams, RegistrationMayOutliveItsConnection) {
  std::promise<void> closed;
  near->receive({[](const Arrival&) {}, [&](const Error&) { closed.set_value(); }});
  const cuda::ShareableMemory memory(*device, 1 << 20);
  const std::weak_ptr<RegistrationCache> seen =
      std::exchange(near_registrations, nullptr);  // from now on only the connection refers to it
  const std::size_t before = verbs.registrations();
  verbs.at_next_registration([&] {
    on_loop([&] { far->close(Error(Blame::Cancelled, "enough")); });
    closed.get_future().wait();
    EXPECT_TRUE(
        loop->drive([&] { return verbs.registrations() <= before / 2; }, harness::patience()))
        << "the stream was not destroyed";
    EXPECT_FALSE(seen.expired());
  });
  auto reached =
      std::async(std::launch::async, [&] { return near->reach(memory.slice(), *device); });
  EXPECT_TRUE(reached.get().ok());
}

// The peer cannot register its source, so the payload arrives through the ring.
TEST_F(VerbsStreams, LostGpuEndsAConnectionMidMessage) {
  const cuda::ShareableMemory memory(*device, 200 << 10);
  const auto reached = far->reach(memory.slice(), *device);
  ASSERT_TRUE(reached.ok());
  Op accepted;
  std::promise<Error> why_near, why_far;
  near->receive({[](const Arrival&) {}, [&](const Error& why) { why_near.set_value(why); }});
  far->receive({[&](const Arrival&) {
                  fake.lose_context(0);
                  accepted = far->accept(std::array{memory.slice()}, nullptr, {});
                },
                [&](const Error& why) { why_far.set_value(why); }});
  const auto payload = harness::pattern(1, memory.slice().bytes);
  on_loop([&] {
    verbs.limit_locked_memory(true);
    near->send({}, std::array{harness::slice_of(payload)}, nullptr, {});
  });
  auto ended = why_far.get_future();
  ASSERT_EQ(ended.wait_for(std::chrono::seconds(20)), std::future_status::ready)
      << "the loop is stuck";
  EXPECT_THAT(ended.get().text(),
              AllOf(HasSubstr("in the middle of a message"), HasSubstr("on cuda:0")));
  EXPECT_EQ(harness::failure_of(accepted).blame(), Blame::Device);
  EXPECT_THAT(why_near.get_future().get().text(), HasSubstr("cuda:0"));
  take_logged();
}

}  // namespace
}  // namespace weft::transport::verbs
