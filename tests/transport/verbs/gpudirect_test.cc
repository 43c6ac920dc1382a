// SPDX-License-Identifier: Apache-2.0
// GPU memory on verbs connections (GPUDirect RDMA): fake GPUs and fake RDMA devices, whose
// registrations are checked.
#include <cstring>
#include <future>
#include <optional>
#include <thread>

#include <weft/cuda/ipc.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/harness/mail.h>
#include <weft/tests/harness/no_more_threads.h>
#include <weft/tests/transport/verbs/ends.h>

namespace weft::transport::verbs {
namespace {

using harness::pattern;
using testing::ElementsAre;
using testing::HasSubstr;

// Names memory of the GPU; the host faults if it touches it.
std::span<std::byte> bytes_of(const Slice& slice) {
  return {static_cast<std::byte*>(slice.data), slice.bytes};
}

harness::FakeDriver::Options out_of_reach(harness::FakeDriver::Options options) {
  options.is_out_of_reach = true;
  return options;
}

class GpuDirectLanes : public cuda::FakeCuda {
 protected:
  explicit GpuDirectLanes(harness::FakeDriver::Options options = {})
      : FakeCuda(out_of_reach(options)) {
    verbs.look_through([this](const void* address) { return fake.behind(address); });
  }
  void fill(const Slice& slice, const std::vector<std::byte>& with) const {
    std::memcpy(fake.behind(slice.data), with.data(), with.size());
  }
  std::vector<std::byte> copy_of(const Slice& slice) const {
    const std::byte* const bytes = fake.behind(slice.data);
    return {bytes, bytes + slice.bytes};
  }
  void join(GpuDirect allowed = GpuDirect::Auto) {
    for (auto* end : {&a, &b}) end->emplace(verbs, QueuePair::Depths{64, 64, 64}, allowed);
    a->pair.join(b->hello());
    b->pair.join(a->hello());
    a->writer.open(b->hello());
    b->writer.open(a->hello());
  }
  void TearDown() override {
    reclaim();
    FakeCuda::TearDown();
  }
  void reclaim() {
    EXPECT_TRUE(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(20))));
  }
  void settle() {
    for (bool found = true; found;) {
      found = a->turn();
      found |= b->turn();
    }
  }
  std::string why_not(const Slice& memory) {
    try {
      a->registrations->gpus().of(memory, *device);
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Unsupported) << error.what();
      return error.text();
    }
    return "";
  }
  int copies() const { return fake.calls(&cuda::Driver::memcpy_async); }

  harness::FakeVerbs verbs;
  std::optional<End> a, b;
  std::vector<std::future<void>> looked_;  // joined when the test ends, at the latest
};

class FlushedGpuDirectLanes : public GpuDirectLanes {
 protected:
  FlushedGpuDirectLanes()
      : GpuDirectLanes({.remote_writes_order = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE}) {}
};
class UnseenGpuDirectLanes : public GpuDirectLanes {
 protected:
  UnseenGpuDirectLanes()
      : GpuDirectLanes({.remote_writes_order = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE,
                        .host_flushes = false}) {}
};

TEST_F(GpuDirectLanes, PartsOfAllocationsMoveDirectly) {
  join();
  const cuda::ShareableMemory from(*device, 3'000'017),
      to(*device, 2'000'001);  // neither starts at a page boundary
  const Slice sent = from.slice().part(1'000'001, 1'234'567),
              place = to.slice().part(4321, 1'234'567);
  const auto content = pattern(1, sent.bytes);
  fill(sent, content);
  const auto of_from = a->registrations->gpus().of(sent, *device);
  const auto of_to = b->registrations->gpus().of(place, *device);
  EXPECT_EQ(of_from->memory().data, from.slice().data) << "the whole allocation";
  EXPECT_EQ(verbs.dma_bufs(), 2u);
  EXPECT_EQ(a->writer.write(std::array{Bytes(bytes_of(sent))}), 0u);
  settle();
  EXPECT_EQ(b->reader.read(bytes_of(place)), 0u);
  settle();
  EXPECT_EQ(a->writer.write(std::array{Bytes(bytes_of(sent))}), sent.bytes);
  EXPECT_EQ(b->reader.read(bytes_of(place)), place.bytes);
  EXPECT_EQ(copy_of(place), content);
  EXPECT_EQ(copies(), 0);
  EXPECT_EQ(a->refused + b->refused, "");
  EXPECT_EQ(fake.calls(&cuda::Driver::flush_gpu_direct_rdma_writes), 0)
      << "this GPU sees writes in order and needs no flush";
}

TEST_F(GpuDirectLanes, RegistersOnceAndForgetsWhenFreed) {
  join();
  GpuRegistrations& gpus = a->registrations->gpus();
  const std::size_t before = verbs.registrations();
  const cuda::ShareableMemory stays(*device, 1 << 20);
  {
    const cuda::ShareableMemory goes(*device, 1 << 20);
    EXPECT_EQ(gpus.of(goes.slice(), *device),
              gpus.of(goes.slice().part(1 << 19, 1 << 18), *device));
    EXPECT_EQ(fake.calls(&cuda::Driver::mem_get_handle_for_address_range), 1);
    const auto held = gpus.of(goes.slice(), *device);
    EXPECT_EQ(gpus.at(goes.slice().data, 1).get(), held.get());
  }
  reclaim();
  EXPECT_EQ(verbs.registrations(), before + 1);
  const auto second = gpus.of(stays.slice(), *device);
  EXPECT_EQ(verbs.registrations(), before + 1) << "the registration of freed memory must be gone";
  EXPECT_EQ(gpus.at(stays.slice().data, stays.slice().bytes).get(), second.get());
  std::byte elsewhere{};
  EXPECT_EQ(gpus.at(&elsewhere, 1), nullptr);
  EXPECT_EQ(gpus.at(static_cast<std::byte*>(stays.slice().data) - 1, 2), nullptr);
  EXPECT_EQ(gpus.at(stays.slice().data, stays.slice().bytes + 1), nullptr);
}

TEST_F(GpuDirectLanes, FreedMemoryIsReleasedByItself) {
  join();
  const std::size_t before = verbs.registrations();
  {
    const cuda::ShareableMemory goes(*device, 1 << 20);
    a->registrations->gpus().of(goes.slice(), *device);
    EXPECT_EQ(verbs.registrations(), before + 1);
  }
  reclaim();
  const Deadline patience = Deadline::in(std::chrono::seconds(30));
  while (verbs.registrations() > before && !patience.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(verbs.registrations(), before);
  EXPECT_EQ(a->registrations->gpus().count(), 0u);
}

TEST_F(GpuDirectLanes, WithoutAThreadItWarnsOnce) {
  join();
  GpuRegistrations& gpus = a->registrations->gpus();
  const cuda::ShareableMemory stays(*device, 1 << 20), other(*device, 1 << 20);
  {
    const cuda::ShareableMemory goes(*device, 1 << 20);
    const harness::NoMoreThreads none;
    if (harness::can_make_threads())
      GTEST_SKIP() << "this system, or this sanitizer, makes threads with stacks of any size";
    gpus.of(goes.slice(), *device);
    gpus.of(stays.slice(), *device);
    EXPECT_EQ(gpus.count(), 2u);
  }
  EXPECT_THAT(take_logged(),
              ElementsAre(HasSubstr("memory of cuda:0 stays allocated after it has been freed")));
  reclaim();
  gpus.of(other.slice(), *device);
  EXPECT_EQ(gpus.count(), 2u) << "the registration of freed memory must be gone";
}

// A stale entry must not make a host address count as a GPU's, and a GPU's memory in use must never
// count as the host's.
TEST_F(GpuDirectLanes, MemoryIsAGpusWhileInUse) {
  join();
  GpuRegistrations& gpus = a->registrations->gpus();
  const cuda::ShareableMemory memory(*device, 1 << 20);
  auto held = gpus.of(memory.slice(), *device);
  EXPECT_NE(gpus.at(memory.slice().data, 1), nullptr);
  held.reset();
  EXPECT_EQ(gpus.at(memory.slice().data, 1), nullptr);
  EXPECT_EQ(gpus.count(), 1u) << "the memory must stay registered";
  held = gpus.of(memory.slice(), *device);
  fake.lose_context(0);
  gpus.forget_freed();
  EXPECT_NE(gpus.at(memory.slice().data, 1), nullptr)
      << "memory of a lost GPU must not count as the host's";
  held.reset();
  gpus.forget_freed();
  EXPECT_EQ(gpus.count(), 0u);
  take_logged();
}

// As with two stages in one process. The registration uses the device that it was made with.
TEST_F(GpuDirectLanes, SharedRegistrationKeepsItsGpu) {
  join();
  GpuRegistrations& gpus = a->registrations->gpus();
  const cuda::ShareableMemory memory(*device, 1 << 20);
  auto other = cuda::Device::open(fake.driver(), 0);
  auto of_other = gpus.of(memory.slice(), *other);
  auto held = gpus.of(memory.slice(), *device);
  EXPECT_EQ(held->local_key(), of_other->local_key());
  of_other.reset();
  other.reset();
  EXPECT_NE(held->gpu(), nullptr);
  EXPECT_NO_THROW(held->flush());
  held.reset();
  EXPECT_EQ(gpus.of(memory.slice(), *device)->gpu(), device) << "it must be registered again";
}

// Called when the driver is asked which allocation an address belongs to.
std::function<void()> when_asked;
decltype(cuda::Driver::mem_get_address_range) ask_driver = nullptr;

// An object that a program may have attached to a GPU.
struct LastUser {
  ~LastUser() { registrations->forget_freed(); }
  std::shared_ptr<GpuRegistrations> registrations;
};

TEST_F(GpuDirectLanes, PollingThreadMayReleaseTheGpuLast) {
  join();
  const auto table = std::make_shared<cuda::Driver>(*fake.driver());
  ask_driver = table->mem_get_address_range;
  table->mem_get_address_range = [](CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) {
    if (when_asked) when_asked();
    return ask_driver(base, bytes, address);
  };
  auto own = cuda::Device::open(table, 0);
  const std::size_t before = verbs.registrations();
  const cuda::ShareableMemory memory(*device, 1 << 20);
  auto registrations = std::make_shared<GpuRegistrations>(a->path.device, GpuDirect::Auto);
  const std::weak_ptr<GpuRegistrations> seen = registrations;
  std::promise<void> asked;
  std::atomic<bool> may_go{false};
  when_asked = [&] {
    if (!may_go.exchange(false)) return;
    own.reset();
    asked.set_value();
  };
  registrations->of(memory.slice(), *own);
  EXPECT_EQ(verbs.registrations(), before + 1);
  own->retirement().retire(Fence(std::make_shared<HostFlag>()),
                           [user = std::make_unique<LastUser>(std::move(registrations))] {});
  may_go = true;  // from now on only the polling thread asks
  asked.get_future().wait();
  const Deadline patience = Deadline::in(std::chrono::seconds(20));
  while (verbs.registrations() > before && !patience.passed()) std::this_thread::yield();
  EXPECT_EQ(verbs.registrations(), before);
  EXPECT_TRUE(seen.expired());
  when_asked = nullptr;
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("closes with 1 retired allocation")));
}

class ReusingGpuDirectLanes : public GpuDirectLanes {
 protected:
  ReusingGpuDirectLanes() : GpuDirectLanes({.reuses_addresses = true}) {}
};

TEST_F(ReusingGpuDirectLanes, ReusedAddressIsANewAllocation) {
  join();
  GpuRegistrations& gpus = a->registrations->gpus();
  std::optional<cuda::ShareableMemory> first(std::in_place, *device, 1 << 20);
  void* const address = first->slice().data;
  auto of_first = gpus.of(first->slice(), *device);
  const auto key = of_first->local_key();
  first.reset();
  reclaim();
  const cuda::ShareableMemory second(*device, 1 << 20);
  ASSERT_EQ(second.slice().data, address);
  auto of_second = gpus.of(second.slice(), *device);
  EXPECT_NE(of_second->local_key(), key);
  EXPECT_EQ(gpus.at(address, 1).get(), of_second.get());
  of_second.reset();
  EXPECT_EQ(gpus.at(address, 1).get(), of_first.get())
      << "a sender of the freed memory must still find a GPU's memory";
  EXPECT_EQ(gpus.count(), 2u);
  of_first.reset();
  gpus.forget_freed();
  EXPECT_EQ(gpus.count(), 1u);
  EXPECT_NE(gpus.of(second.slice(), *device)->local_key(), key);
}

TEST_F(GpuDirectLanes, RefusedMemoryIsNotRetriedEachTime) {
  join();
  verbs.limit_locked_memory(true);
  const cuda::ShareableMemory one(*device, 1 << 20), other(*device, 1 << 20);
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(why_not(one.slice()), HasSubstr("ibv_reg_dmabuf_mr: Cannot allocate memory"));
    EXPECT_THAT(why_not(other.slice()), HasSubstr("ibv_reg_dmabuf_mr: Cannot allocate memory"));
  }
  EXPECT_EQ(fake.calls(&cuda::Driver::mem_get_handle_for_address_range), 2);
  EXPECT_EQ(take_logged().size(), 1u);
}

TEST_F(GpuDirectLanes, LookupsDoNotWaitForRegistering) {
  join();
  GpuRegistrations& gpus = a->registrations->gpus();
  const cuda::ShareableMemory known(*device, 1 << 20), unknown(*device, 1 << 20);
  const auto held = gpus.of(known.slice(), *device);
  bool was_called = false;
  verbs.at_next_registration([&] {
    was_called = true;
    auto looked = std::async(std::launch::async, [&] {
      EXPECT_NE(gpus.at(known.slice().data, 1), nullptr);
      EXPECT_EQ(gpus.of(known.slice(), *device)->local_key(), held->local_key());
    });
    EXPECT_EQ(looked.wait_for(std::chrono::seconds(20)), std::future_status::ready);
    looked_.push_back(std::move(looked));
  });
  gpus.of(unknown.slice(), *device);
  EXPECT_TRUE(was_called);
}

TEST_F(GpuDirectLanes, FallsBackToPeerThenPinnedMemory) {
  verbs.refuse_dma_bufs(true);
  join();  // nvidia_peermem is not loaded on this machine
  const cuda::ShareableMemory memory(*device, 1 << 20);
  const std::string why = why_not(memory.slice());
  EXPECT_THAT(why, HasSubstr("fake0 registers no dma-buf"));
  EXPECT_THAT(why, HasSubstr("nvidia_peermem is not loaded"));
  EXPECT_EQ(why_not(memory.slice()), why);
  EXPECT_THAT(take_logged(),
              ElementsAre(HasSubstr("memory of cuda:0 goes through pinned memory: ")))
      << "must be logged once";

  join(GpuDirect::PeerMemory);
  EXPECT_EQ(why_not(memory.slice()), "");
  EXPECT_EQ(verbs.dma_bufs(), 0u);

  verbs.refuse_dma_bufs(false);
  join(GpuDirect::PeerMemory);
  EXPECT_EQ(why_not(memory.slice()), "");
  EXPECT_EQ(verbs.dma_bufs(), 0u) << "peer memory was asked for";
  verbs.limit_locked_memory(true);
  const cuda::ShareableMemory other(*device, 1 << 20);
  EXPECT_THAT(why_not(other.slice()),
              HasSubstr("nvidia_peermem, ibv_reg_mr: Cannot allocate memory"));
  EXPECT_EQ(take_logged().size(), 1u);
  verbs.limit_locked_memory(false);

  join(GpuDirect::Off);
  EXPECT_THAT(why_not(memory.slice()), HasSubstr("WEFT_GPUDIRECT is off"));
  EXPECT_EQ(take_logged().size(), 1u);
}

TEST_F(GpuDirectLanes, RefusesMemoryAcrossAllocations) {
  join();
  const cuda::ShareableMemory memory(*device, 1 << 20);
  Slice too_long = memory.slice();
  too_long.bytes += 1;
  EXPECT_THAT(why_not(too_long), HasSubstr("across several allocations"));
  EXPECT_EQ(take_logged().size(), 1u);
}

TEST_F(GpuDirectLanes, LogsRefusalOnceAndNotForALostGpu) {
  join();
  GpuRegistrations& gpus = a->registrations->gpus();
  std::byte of_host{};
  const Slice nowhere{&of_host, 1, device->id()};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(cuda::error_from([&] { gpus.of(nowhere, *device); }).blame(), Blame::Caller);
  }
  EXPECT_THAT(
      take_logged(),
      ElementsAre(HasSubstr("memory of cuda:0 goes through pinned memory: cuMemGetAddressRange")));
  fake.lose_context(0);
  EXPECT_EQ(cuda::error_from([&] { gpus.of(nowhere, *device); }).blame(), Blame::Device);
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("cuda:0 is lost")))
      << "only the GPU itself logs it";
}

TEST_F(FlushedGpuDirectLanes, ReceivedBytesAreFlushedFirst) {
  join();
  const cuda::ShareableMemory to(*device, 1 << 20);
  const auto held = b->registrations->gpus().of(to.slice(), *device);
  const auto content = pattern(2, 1 << 20);
  a->writer.write(std::array{Bytes(content)});
  settle();
  b->reader.read(bytes_of(to.slice()));
  EXPECT_EQ(fake.calls(&cuda::Driver::flush_gpu_direct_rdma_writes), 0);
  settle();
  EXPECT_EQ(fake.calls(&cuda::Driver::flush_gpu_direct_rdma_writes), 1);
  EXPECT_EQ(b->reader.read(bytes_of(to.slice())), content.size());
  EXPECT_EQ(copy_of(to.slice()), content);
}

TEST_F(FlushedGpuDirectLanes, LostGpuEndsTheConnection) {
  join();
  const cuda::ShareableMemory to(*device, 1 << 20);
  const auto held = b->registrations->gpus().of(to.slice(), *device);
  const auto content = pattern(2, 1 << 20);
  a->writer.write(std::array{Bytes(content)});
  settle();
  b->reader.read(bytes_of(to.slice()));
  fake.lose_context(0);
  EXPECT_EQ(cuda::error_from([&] { settle(); }).blame(), Blame::Device);
  take_logged();
}

TEST_F(UnseenGpuDirectLanes, UnorderedGpuUsesPinnedMemory) {
  join();
  const cuda::ShareableMemory memory(*device, 1 << 20);
  EXPECT_THAT(why_not(memory.slice()), HasSubstr("in a defined order"));
  EXPECT_EQ(take_logged().size(), 1u);
}

class ThreadedGpuDirectLanes : public GpuDirectLanes {
 protected:
  ThreadedGpuDirectLanes() : GpuDirectLanes({.threads = true}) {}
};

// A peer that discards the payload, or cannot register its destination.
TEST_F(ThreadedGpuDirectLanes, PeerWithoutAPlaceGetsItByTheRing) {
  join();
  const cuda::ShareableMemory from(*device, 1 << 20);
  const auto content = pattern(3, 1 << 20);
  fill(from.slice(), content);
  const auto held = a->registrations->gpus().of(from.slice(), *device);
  std::vector<std::byte> got;
  std::size_t written = 0;
  while (got.size() < content.size()) {
    written += a->writer.write(std::array{Bytes(bytes_of(from.slice())).subspan(written)});
    settle();
    const Bytes seen = b->reader.peek();
    got.insert(got.end(), seen.begin(), seen.end());
    b->reader.consume(seen.size());
    settle();
  }
  EXPECT_EQ(got, content);
  EXPECT_GT(copies(), 1) << "the host must not touch the GPU's memory";
  EXPECT_THAT(
      take_logged(),
      ElementsAre(HasSubstr("memory of cuda:0 is copied to the other end through the ring")));
}

TEST_F(ThreadedGpuDirectLanes, RestBeyondASmallPlaceMovesDirectly) {
  join();
  const cuda::ShareableMemory from(*device, 1 << 20);
  const auto content = pattern(4, 1 << 20);
  fill(from.slice(), content);
  const auto held = a->registrations->gpus().of(from.slice(), *device);
  std::vector<std::byte> got(content.size());
  const std::size_t first = content.size() - 10'000;
  std::size_t written = 0, read = 0;
  while (read < got.size()) {
    written += a->writer.write(std::array{Bytes(bytes_of(from.slice())).subspan(written)});
    settle();
    const std::size_t end = read < first ? first : got.size();
    read += b->reader.read(std::span(got).subspan(read, end - read));
    settle();
  }
  EXPECT_EQ(got, content);
  EXPECT_EQ(copies(), 0);
}

// The last write of each piece is so short that a queue pair might carry it inline, which the host
// would read.
TEST_F(ThreadedGpuDirectLanes, ShortRestIsNotReadByTheHost) {
  join();
  for (const std::size_t rest : {1, 40, 41, 64, 65}) {
    SCOPED_TRACE(rest);
    const cuda::ShareableMemory from(*device, (1 << 20) + rest), to(*device, (1 << 20) + rest);
    const auto content = pattern(6, from.slice().bytes);
    fill(from.slice(), content);
    const auto held = a->registrations->gpus().of(from.slice(), *device);
    const auto held_too = b->registrations->gpus().of(to.slice(), *device);
    EXPECT_EQ(a->writer.write(std::array{Bytes(bytes_of(from.slice()))}), 0u);
    settle();
    EXPECT_EQ(b->reader.read(bytes_of(to.slice())), 0u);
    settle();
    EXPECT_EQ(a->failed, IBV_WC_SUCCESS);
    EXPECT_EQ(a->writer.write(std::array{Bytes(bytes_of(from.slice()))}), content.size());
    EXPECT_EQ(b->reader.read(bytes_of(to.slice())), content.size());
    EXPECT_EQ(copy_of(to.slice()), content);
  }
  EXPECT_EQ(copies(), 0);
}

TEST_F(ThreadedGpuDirectLanes, FailedCopyToALostGpuIsFinal) {
  join();
  const cuda::ShareableMemory to(*device, 1 << 20);
  const auto held = b->registrations->gpus().of(to.slice(), *device);
  const auto content = pattern(5, 100'000);
  EXPECT_EQ(a->writer.write(std::array{Bytes(content)}), content.size());
  settle();
  EXPECT_EQ(b->reader.peek().size(), content.size());
  fake.lose_context(0);
  EXPECT_EQ(b->reader.read(bytes_of(to.slice()).first(content.size())), 0u);
  EXPECT_TRUE(b->reader.peek().empty());
  EXPECT_EQ(b->reader.read(bytes_of(to.slice()).first(content.size())), 0u);
  const auto why = b->writer.failure();
  ASSERT_TRUE(why);
  EXPECT_EQ(why->blame(), Blame::Device);
  EXPECT_THAT(why->text(), HasSubstr("cuda:0"));
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("is copied"), HasSubstr("cuda:0 is lost")))
      << "the GPU logs it once; the connection reports it to its owner";
}

TEST_F(ThreadedGpuDirectLanes, FailedCopyFromALostGpuNamesIt) {
  join();
  const cuda::ShareableMemory from(*device, 1 << 20);
  const auto held = a->registrations->gpus().of(from.slice(), *device);
  a->writer.write(std::array{Bytes(bytes_of(from.slice()))});
  settle();
  b->reader.peek();  // names no place for it
  settle();
  fake.lose_context(0);
  EXPECT_EQ(a->writer.write(std::array{Bytes(bytes_of(from.slice()))}), 0u);
  const auto why = a->writer.failure();
  ASSERT_TRUE(why);
  EXPECT_EQ(why->blame(), Blame::Device);
  EXPECT_THAT(why->text(), HasSubstr("cuda:0"));
  take_logged();
}

TEST_F(ThreadedGpuDirectLanes, RingBytesAreCopiedToTheGpu) {
  join();
  const cuda::ShareableMemory to(*device, 1 << 20);
  const auto held = b->registrations->gpus().of(to.slice(), *device);
  const auto content = pattern(5, 100'000);
  EXPECT_EQ(a->writer.write(std::array{Bytes(content)}), content.size());
  settle();
  for (const std::size_t at : {0, 50'000}) {
    EXPECT_EQ(b->reader.read(bytes_of(to.slice()).subspan(at, 50'000)), 50'000u);
  }
  EXPECT_EQ(copy_of(to.slice().part(0, content.size())), content);
  EXPECT_EQ(copies(), 2) << "the host must not touch the GPU's memory";
  EXPECT_THAT(
      take_logged(),
      ElementsAre(HasSubstr("data from the other end is copied to memory of cuda:0 through")));
}

}  // namespace
}  // namespace weft::transport::verbs
