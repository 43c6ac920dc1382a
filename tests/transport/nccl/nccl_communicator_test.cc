// SPDX-License-Identifier: Apache-2.0
// The NCCL backend over the fake NCCL: which calls it makes, and how it fails. (tests/conformance
// checks for every backend that results are right.)
#include <cstring>
#include <map>
#include <thread>

#include <gmock/gmock.h>

#include <weft/cuda/fence.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/poll.h>
#include <weft/profiling/trace/trace.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/harness/device_timeline.h>
#include <weft/tests/harness/fake_nccl.h>
#include <weft/tests/harness/memory_bootstrap.h>
#ifdef WEFT_TEST_NVTX
#include <weft/tests/harness/nvtx_tool.h>
#endif
#include <weft/transport/nccl/nccl.h>
#include <weft/transport/nccl/nccl_communicator.h>

namespace weft::transport::nccl {
namespace {

using testing::HasSubstr;
using Ranks = std::vector<std::shared_ptr<Communicator>>;

Deadline soon() { return Deadline::in(std::chrono::seconds(30)); }

class NcclTest : public cuda::ThreadedCuda {
 protected:
  JoinOptions options(int rank, int size) {
    JoinOptions made;
    made.rank = rank;
    made.size = size;
    made.group_name = "test";
    made.store = store;
    made.device = device->id();
    made.cuda = device;
    made.timeout = timeout;
    made.loop = loop;
    return made;
  }

  std::shared_ptr<Communicator> join_one(int rank, int size) {
    return std::make_shared<NcclCommunicator>(options(rank, size), nccl.library());
  }

  Ranks join(int size) {
    Ranks ranks(static_cast<std::size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          ranks[static_cast<std::size_t>(rank)] = join_one(rank, size);
        } catch (const Error& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return ranks;
  }

  // Device memory that holds the number and is ready.
  std::shared_ptr<cuda::DeviceMemory> number(float value) {
    auto memory = std::make_shared<cuda::DeviceMemory>(stream, sizeof value);
    EXPECT_TRUE(cuda::record(stream).synchronize(soon()));
    std::memcpy(memory->slice().data, &value, sizeof value);
    return memory;
  }
  static float value_of(const cuda::DeviceMemory& memory) {
    float value = 0;
    std::memcpy(&value, memory.slice().data, sizeof value);
    return value;
  }
  static Elements floats(const cuda::DeviceMemory& memory) {
    return {memory.slice(), Dtype::Float32};
  }

  // Returns the error that the Op ends with.
  static Error error_of(const Op& op) {
    EXPECT_TRUE(op.done().synchronize(soon())) << "the fence of a failed operation does not pass";
    const auto error = op.error();
    return error.value_or(Error(Blame::Cancelled, "it did not fail"));
  }

  // Closes everything before the fakes check that nothing is left.
  void TearDown() override {
    loop.reset();
    EXPECT_TRUE(device->retirement().reclaim_all(soon()));
    ThreadedCuda::TearDown();
  }

  std::chrono::milliseconds timeout = std::chrono::seconds(30);
  harness::FakeNccl nccl{fake};
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("nccl test");
  std::shared_ptr<harness::MemoryBootstrap> store = std::make_shared<harness::MemoryBootstrap>();
  cuda::Stream stream{*device};
  cuda::FlagPool flags{*device};
};

// This is how NCCL refuses two ranks on one GPU ("Duplicate GPU detected").
TEST_F(NcclTest, RefusalAtStartIsTheCallersError) {
  nccl.fail(&Library::comm_init_rank_config, ncclInvalidUsage);
  const Error error = cuda::error_from([&] { join_one(0, 1); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_EQ(error.native_code(), ncclInvalidUsage);
  EXPECT_THAT(error.text(), HasSubstr("said by the fake NCCL"));
  EXPECT_EQ(nccl.alive(), 0);
}

TEST_F(NcclTest, UnawaitedOperationsFreeTheirMemory) {
  auto ranks = join(2);
  std::vector<std::weak_ptr<cuda::DeviceMemory>> watched;
  for (int i = 0; i < 200; ++i) {
    for (const auto& rank : ranks) {
      const auto memory = number(1);
      watched.emplace_back(memory);
      static_cast<void>(rank->all_reduce(floats(*memory), ReduceOp::Sum, memory, Fence()));
    }
  }
  const auto all_gone = [&] {
    return std::all_of(watched.begin(), watched.end(),
                       [](const auto& one) { return one.expired(); });
  };
  EXPECT_TRUE(loop->drive(all_gone, soon()));
}

TEST_F(NcclTest, JoiningTimesOutIfARankIsMissing) {
  timeout = std::chrono::milliseconds(50);
  const Error error = cuda::error_from([&] { join_one(0, 2); });
  EXPECT_EQ(error.blame(), Blame::Timeout);
  EXPECT_THAT(error.text(), HasSubstr("joining on group 'test' (nccl, rank 0 of 2)"));
  EXPECT_EQ(nccl.alive(), 0) << "the communicator of the failed join is still there";
}

TEST_F(NcclTest, RankZerosFailureFailsAllJoins) {
  nccl.fail(&Library::get_unique_id, ncclSystemError);
  EXPECT_EQ(cuda::error_from([&] { join_one(0, 2); }).blame(), Blame::PeerLost);
  const Error other = cuda::error_from([&] { join_one(1, 2); });
  EXPECT_EQ(other.blame(), Blame::PeerLost);
  EXPECT_THAT(other.text(), HasSubstr("rank 0 could not start NCCL"));
}

TEST_F(NcclTest, ErrorAsLongAsAnIdIsNotAnId) {
  const std::string text(sizeof(ncclUniqueId) - 1, 'x');
  std::vector<std::byte> said{std::byte{0}};  // marks an error; its text follows
  for (const char letter : text) said.push_back(static_cast<std::byte>(letter));
  ASSERT_EQ(said.size(), sizeof(ncclUniqueId));
  store->set("nccl_id", said);
  timeout = std::chrono::milliseconds(200);
  const Error error = cuda::error_from([&] { join_one(1, 2); });
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_THAT(error.text(), HasSubstr("rank 0 could not start NCCL: " + text));
}

TEST_F(NcclTest, JoiningWithoutAGpuIsRefused) {
  Nccl transport([&] { return nccl.library(); });
  JoinOptions made = options(0, 1);
  made.cuda = nullptr;
  const Error error = cuda::error_from([&] { transport.join(made); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr("no GPU was given"));
}

TEST_F(NcclTest, LibraryIsOpenedAtTheFirstJoin) {
  int opened = 0;
  Nccl transport([&]() -> Result<std::shared_ptr<const Library>> {
    ++opened;
    return Error(Blame::Unsupported, "no libnccl.so.2 that can be used");
  });
  EXPECT_EQ(opened, 0);
  const Error error = cuda::error_from([&] { transport.join(options(0, 1)); });
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_THAT(error.text(), HasSubstr("no libnccl.so.2"));
  EXPECT_EQ(opened, 1);
}

TEST_F(NcclTest, EnqueuingDoesNotBlockTheHost) {
  auto ranks = join(2);
  const auto a = number(1), b = number(2);
  const int blocks = fake.host_blocks();
  const Op first = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  EXPECT_FALSE(first.done().query());
  const Op second = ranks[1]->all_reduce(floats(*b), ReduceOp::Sum, b, Fence());
  // A stream waits, the host does not.
  first.done().wait(stream);
  second.done().wait(stream);
  EXPECT_EQ(fake.host_blocks(), blocks);
  EXPECT_TRUE(cuda::record(stream).synchronize(soon()));
  EXPECT_EQ(value_of(*a), 3);
  EXPECT_EQ(value_of(*b), 3);
}

TEST_F(NcclTest, OperationReadsOnlyAfterReady) {
  auto ranks = join(2);
  const auto a = number(1), b = number(2);
  const auto gate = flags.make();
  gate->wait(stream);
  const Fence ready = cuda::record(stream);
  const Op first = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, ready);
  const Op second = ranks[1]->all_reduce(floats(*b), ReduceOp::Sum, b, Fence());
  EXPECT_FALSE(second.done().synchronize(Deadline::in(std::chrono::milliseconds(5))));
  const float late = 10;
  std::memcpy(a->slice().data, &late, sizeof late);
  gate->raise();
  EXPECT_TRUE(second.done().synchronize(soon()));
  EXPECT_TRUE(first.done().synchronize(soon()));
  EXPECT_EQ(value_of(*b), 12);
}

TEST_F(NcclTest, PinIsHeldUntilTheStreamIsDone) {
  auto ranks = join(2);
  auto a = number(1);
  const auto b = number(2);
  const std::weak_ptr<cuda::DeviceMemory> watched = a;
  const Op first = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  a.reset();
  EXPECT_FALSE(watched.expired());
  const Op second = ranks[1]->all_reduce(floats(*b), ReduceOp::Sum, b, Fence());
  EXPECT_TRUE(loop->drive([&] { return watched.expired(); }, soon()));
  EXPECT_TRUE(first.done().query());
}

#if WEFT_TRACE_ENABLED
// The second operation is queued, so another thread enqueues it.
TEST_F(NcclTest, OperationIsASpanWithAnArrowToIt) {
  constinit static trace::Name bucket{trace::Layer::User, "bucket"};
  auto ranks = join(2);
  const auto a = number(1), b = number(2);
  const auto both = std::make_shared<cuda::DeviceMemory>(stream, 2 * sizeof(float));
  const Slice parts[] = {both->slice().part(0, 4), both->slice().part(4, 4)};
  harness::DeviceTimeline timeline;
  nccl.hold(0);
  std::vector<Op> ops;
  {
    const trace::Range range(bucket);
    ops.push_back(ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence()));
    ops.push_back(ranks[0]->all_gather(parts, floats(*a), both, Fence()));
  }
  ops.push_back(ranks[1]->all_reduce(floats(*b), ReduceOp::Sum, b, Fence()));
  ops.push_back(ranks[1]->all_gather(parts, floats(*b), both, Fence()));
  nccl.release(0);
  for (const Op& op : ops) EXPECT_TRUE(op.done().synchronize(soon()));
  std::map<int, std::vector<std::string>> shown;
  for (const auto& span : timeline.ended(4)) {
    EXPECT_EQ(span.layer, "transport");
    shown[span.rank].push_back(span.name + ": " + std::to_string(span.bytes) + " bytes");
  }
  const std::vector<std::string> expected{"all_reduce: 4 bytes", "all_gather: 12 bytes"};
  EXPECT_EQ(shown, (std::map<int, std::vector<std::string>>{{0, expected}, {1, expected}}));
  EXPECT_THAT(timeline.arrows(),
              testing::ElementsAre("bucket > nccl enqueue -> all_gather",
                                   "bucket > nccl enqueue -> all_reduce",
                                   "nccl enqueue -> all_gather", "nccl enqueue -> all_reduce"));
}
#endif

#ifdef WEFT_TEST_NVTX
// Attached once, before anything is traced.
[[maybe_unused]] const bool tool_is_attached = (harness::attach_nvtx_tool(), true);

TEST_F(NcclTest, NvtxToolSeesEachReduction) {
  auto ranks = join(2);
  const auto a = number(1), b = number(2);
  harness::take_nvtx_recording();
  const Op first = ranks[0]->all_reduce(floats(*a), ReduceOp::Max, a, Fence());
  const Op second = ranks[1]->all_reduce(floats(*b), ReduceOp::Max, b, Fence());
  EXPECT_TRUE(first.done().synchronize(soon()) && second.done().synchronize(soon()));
  const auto expected = [](const char* rank) {
    return std::map<std::string, std::string>{{"NCCL communicator ID", "0"},
                                              {"Message size [bytes]", "4"},
                                              {"Reduction operation", "Max"},
                                              {"Rank", rank},
                                              {"No. of ranks", "2"},
                                              {"CUDA device", "0"},
                                              {"Root", "-1"},
                                              {"Peer rank", "-1"}};
  };
  EXPECT_THAT(harness::take_nvtx_recording().payloads("push weft.transport nccl enqueue"),
              testing::ElementsAre(expected("0"), expected("1")));
}
#endif

TEST_F(NcclTest, ConnectingOperationsKeepTheirOrder) {
  auto ranks = join(2);
  nccl.hold(0);
  std::vector<std::shared_ptr<cuda::DeviceMemory>> a, b;
  std::vector<Op> ops;
  for (int i = 0; i < 5; ++i) {
    a.push_back(number(static_cast<float>(i)));
    b.push_back(number(100));
    ops.push_back(ranks[0]->all_reduce(floats(*a.back()), ReduceOp::Sum, a.back(), Fence()));
    ops.push_back(ranks[1]->all_reduce(floats(*b.back()), ReduceOp::Sum, b.back(), Fence()));
  }
  for (const Op& op : ops) EXPECT_FALSE(op.done().query());
  nccl.release(0);
  for (const Op& op : ops) EXPECT_TRUE(op.done().synchronize(soon()));
  for (int i = 0; i < 5; ++i)
    EXPECT_EQ(value_of(*a[static_cast<std::size_t>(i)]), static_cast<float>(100 + i));
}

TEST_F(NcclTest, StreamCanAwaitAQueuedOperation) {
  auto ranks = join(2);
  nccl.hold(0);
  const auto a = number(1), b = number(2);
  const Op first = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  const Op second = ranks[1]->all_reduce(floats(*b), ReduceOp::Sum, b, Fence());
  std::thread waiter([&] { first.done().wait(stream); });
  nccl.release(0);
  waiter.join();
  EXPECT_TRUE(cuda::record(stream).synchronize(soon()));
  EXPECT_EQ(value_of(*a), 3);
  EXPECT_TRUE(second.done().synchronize(soon()));
}

TEST_F(NcclTest, UnmatchedOperationTimesOut) {
  timeout = std::chrono::milliseconds(500);
  auto ranks = join(2);
  const auto a = number(1);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  const Error error = error_of(op);
  EXPECT_EQ(error.blame(), Blame::Timeout);
  EXPECT_THAT(error.text(), HasSubstr("all_reduce on group 'test' (nccl, rank 0 of 2)"));
  EXPECT_THAT(error.text(), HasSubstr("500 ms"));
  // The communicator is broken: later operations fail at once.
  const Op later = ranks[0]->barrier(Fence());
  EXPECT_TRUE(later.done().query());
  EXPECT_THAT(error_of(later).text(), HasSubstr("500 ms"));
}

TEST_F(NcclTest, DeadlineCountsFromReady) {
  timeout = std::chrono::milliseconds(500);
  auto ranks = join(1);
  const auto a = number(1);
  const auto gate = flags.make();
  gate->wait(stream);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, cuda::record(stream));
  EXPECT_FALSE(op.done().synchronize(Deadline::in(3 * timeout)));
  EXPECT_FALSE(op.error());
  gate->raise();
  EXPECT_TRUE(op.done().synchronize(soon()));
  EXPECT_FALSE(op.error());
}

TEST_F(NcclTest, AsynchronousErrorFailsOperations) {
  auto ranks = join(2);
  const auto a = number(1);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  nccl.fail_async(0, ncclRemoteError);
  const Error error = error_of(op);
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_EQ(error.native_code(), ncclRemoteError);
  EXPECT_THAT(error.text(), HasSubstr("said by the fake NCCL"));
}

TEST_F(NcclTest, RefusedCallFailsLaterOperations) {
  auto ranks = join(2);
  const auto a = number(1);
  nccl.fail(&Library::all_reduce, ncclInternalError);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  EXPECT_EQ(error_of(op).blame(), Blame::Device);
  EXPECT_TRUE(ranks[0]->barrier(Fence()).error());
}

TEST_F(NcclTest, AbortKeepsPinsUntilStreamIsDone) {
  auto ranks = join(2);
  auto a = number(1);
  const std::weak_ptr<cuda::DeviceMemory> watched = a;
  const auto gate = flags.make();
  gate->wait(stream);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, cuda::record(stream));
  a.reset();
  std::thread other([&] { ranks[0]->abort(Error(Blame::Cancelled, "enough")); });
  other.join();
  ranks[0]->abort(Error(Blame::Cancelled, "twice"));
  ASSERT_TRUE(op.error()) << "the error must be set before the fence passes";
  EXPECT_THAT(op.error()->text(), HasSubstr("enough"));
  EXPECT_FALSE(watched.expired()) << "released before the stream has passed the operation";
  gate->raise();
  EXPECT_TRUE(op.done().synchronize(soon()));
  EXPECT_TRUE(loop->drive([&] { return watched.expired(); }, soon()));
}

TEST_F(NcclTest, AbortEndsConnectingOperations) {
  auto ranks = join(2);
  nccl.hold(0);
  const auto a = number(1);
  const Op first = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  const Op second = ranks[0]->barrier(Fence());
  ranks[0]->abort(Error(Blame::Cancelled, "enough"));
  EXPECT_EQ(error_of(first).blame(), Blame::Cancelled);
  EXPECT_EQ(error_of(second).blame(), Blame::Cancelled);
}

TEST_F(NcclTest, LostDeviceFailsItsOperations) {
  auto ranks = join(2);
  const auto a = number(1);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  fake.lose_context(0);
  EXPECT_TRUE(loop->drive([&] { return op.error().has_value(); }, soon()));
  EXPECT_EQ(error_of(op).blame(), Blame::Device);
  EXPECT_EQ(error_of(ranks[1]->barrier(Fence())).blame(), Blame::Device);
  EXPECT_THAT(take_logged(), testing::Contains(HasSubstr("is lost")));
  ranks.clear();
  loop.reset();
  EXPECT_TRUE(device->retirement().reclaim_all(soon()));
  EXPECT_EQ(nccl.calls(&Library::comm_abort), 0) << "resources of a lost context cannot be freed";
  nccl.forget_alive();
}

TEST_F(NcclTest, DroppingFinishesOperations) {
  auto ranks = join(2);
  const auto a = number(1), b = number(2);
  const Op first = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  ranks[0].reset();
  const Op second = ranks[1]->all_reduce(floats(*b), ReduceOp::Sum, b, Fence());
  EXPECT_TRUE(first.done().synchronize(soon()));
  EXPECT_TRUE(second.done().synchronize(soon()));
  EXPECT_EQ(value_of(*a), 3);
  EXPECT_FALSE(first.error());
}

TEST_F(NcclTest, EndedLoopFailsOperations) {
  auto ranks = join(2);
  const auto a = number(1);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  ranks.clear();
  loop.reset();
  EXPECT_EQ(error_of(op).blame(), Blame::Cancelled);
}

TEST_F(NcclTest, UnsupportedFeaturesAreRefused) {
  auto ranks = join(2);
  const auto a = number(1);
  const Elements data = floats(*a);
  PointToPoint* const messages = ranks[0]->point_to_point();
  ASSERT_NE(messages, nullptr);
  EXPECT_FALSE(messages->has_tags());
  EXPECT_FALSE(messages->has_any_source());
  const auto text = [](const Op& op) { return std::string(error_of(op).what()); };
  EXPECT_THAT(text(messages->send(data, 1, 7, a, Fence())), HasSubstr("tag 7"));
  EXPECT_THAT(text(messages->recv(data, 1, 7, a, Fence())), HasSubstr("tag 7"));
  EXPECT_THAT(text(messages->recv(data, kAnySource, 0, a, Fence())), HasSubstr("any rank"));
  EXPECT_THAT(text(messages->send(data, 0, 0, a, Fence())), HasSubstr("this rank"));
  EXPECT_THAT(text(ranks[0]->all_reduce(data, ReduceOp::BitXor, a, Fence())),
              HasSubstr("float32 with BitXor"));
  for (const ReduceOp op : {ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor}) {
    EXPECT_FALSE(ranks[0]->can_reduce(Dtype::Int32, op));
    EXPECT_FALSE(ranks[0]->can_reduce(Dtype::Bool, op));
  }
  EXPECT_FALSE(ranks[0]->can_reduce(Dtype::Int16, ReduceOp::Sum));
  EXPECT_FALSE(ranks[0]->can_reduce(Dtype::Int32, ReduceOp::Avg));
  EXPECT_FALSE(ranks[0]->can_reduce(Dtype::ComplexFloat32, ReduceOp::Max));
  EXPECT_TRUE(ranks[0]->can_reduce(Dtype::ComplexFloat32, ReduceOp::Avg));
  EXPECT_TRUE(ranks[0]->can_reduce(Dtype::Bool, ReduceOp::Sum));
}

TEST_F(NcclTest, OnePieceIsGatheredByOneCall) {
  auto ranks = join(1);
  const auto a = number(4), out = number(0);
  const Slice whole = out->slice();
  const int gathers = nccl.calls(&Library::all_gather);
  const Op op = ranks[0]->all_gather({&whole, 1}, floats(*a), out, Fence());
  EXPECT_TRUE(op.done().synchronize(soon()));
  EXPECT_EQ(nccl.calls(&Library::all_gather), gathers + 1);
  EXPECT_EQ(value_of(*out), 4);
}

TEST_F(NcclTest, ReclaimingClosesCommunicators) {
  auto ranks = join(2);
  ranks.clear();
  EXPECT_EQ(nccl.alive(), 2) << "dropping a communicator must not wait until it is closed";
  EXPECT_TRUE(device->retirement().reclaim_all(soon()));
  EXPECT_EQ(nccl.alive(), 0);
  EXPECT_EQ(nccl.aborted(), 0);
}

// --- Captured into a CUDA graph

class NcclGraphTest : public NcclTest {
 protected:
  // Captures one all_reduce of the number into a graph; the captured stream waits for it.
  Op capture(Communicator& rank, cuda::Stream& on,
             const std::shared_ptr<cuda::DeviceMemory>& memory, harness::FakeDriver::Graph& graph) {
    EXPECT_EQ(fake.begin_capture(on), CUDA_SUCCESS);
    const Op op = rank.all_reduce(floats(*memory), ReduceOp::Sum, memory, cuda::record(on));
    op.done().wait(on);
    EXPECT_EQ(fake.end_capture(on, graph), CUDA_SUCCESS);
    return op;
  }
  static void set(const cuda::DeviceMemory& memory, float value) {
    std::memcpy(memory.slice().data, &value, sizeof value);
  }

  cuda::Stream streams[2] = {cuda::Stream(*device), cuda::Stream(*device)};
};

TEST_F(NcclGraphTest, CapturedOperationRunsAtEachLaunch) {
  auto ranks = join(2);
  const std::shared_ptr<cuda::DeviceMemory> memory[2] = {number(1), number(2)};
  harness::FakeDriver::Graph graphs[2];
  for (std::size_t i = 0; i < 2; ++i) {
    const Op op = capture(*ranks[i], streams[i], memory[i], graphs[i]);
    EXPECT_TRUE(op.done().synchronize(soon()));
    EXPECT_TRUE(loop->drive([&] { return op.ended(); }, soon()));
    EXPECT_FALSE(op.error());
  }
  EXPECT_EQ(value_of(*memory[0]), 1) << "the graph has not been launched yet";
  for (const float value : {10.0f, 20.0f, 30.0f}) {
    for (std::size_t i = 0; i < 2; ++i) {
      set(*memory[i], value + static_cast<float>(i));
      ASSERT_EQ(fake.launch(graphs[i], streams[i]), CUDA_SUCCESS);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(cuda::record(streams[i]).synchronize(soon()));
      EXPECT_EQ(value_of(*memory[i]), 2 * value + 1);
    }
  }
  // Later operations are not captured.
  const Op first =
      ranks[0]->all_reduce(floats(*memory[0]), ReduceOp::Sum, memory[0], cuda::record(streams[0]));
  const Op second =
      ranks[1]->all_reduce(floats(*memory[1]), ReduceOp::Sum, memory[1], cuda::record(streams[1]));
  EXPECT_TRUE(first.done().synchronize(soon()));
  EXPECT_TRUE(second.done().synchronize(soon()));
  EXPECT_EQ(value_of(*memory[0]), 122);
}

TEST_F(NcclGraphTest, PollingOthersKeepsTheCaptureValid) {
  auto ranks = join(2);
  store = std::make_shared<harness::MemoryBootstrap>();
  auto others = join(2);  // another group, with an operation that its peer has not entered yet
  const auto a = number(1), b = number(2), c = number(3), d = number(4);
  const Op waiting = others[0]->all_reduce(floats(*c), ReduceOp::Sum, c, Fence());
  for (int round = 0; round < 10; ++round) {
    harness::FakeDriver::Graph graph;
    ASSERT_EQ(fake.begin_capture(streams[0]), CUDA_SUCCESS);
    const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, cuda::record(streams[0]));
    op.done().wait(streams[0]);
    const int asked = fake.calls(&cuda::Driver::event_query);
    EXPECT_TRUE(
        loop->drive([&] { return fake.calls(&cuda::Driver::event_query) > asked; }, soon()));
    EXPECT_FALSE(op.ended());
    EXPECT_EQ(fake.end_capture(streams[0], graph), CUDA_SUCCESS);
  }
  const Op coming = others[1]->all_reduce(floats(*d), ReduceOp::Sum, d, Fence());
  EXPECT_TRUE(waiting.done().synchronize(soon()));
  EXPECT_EQ(value_of(*c), 7);
  EXPECT_TRUE(coming.done().synchronize(soon()));
}

TEST_F(NcclGraphTest, CapturedCallReturnsOnceConnected) {
  auto ranks = join(2);
  const auto a = number(1), b = number(2);
  harness::FakeDriver::Graph graph;
  nccl.hold(0);
  const int before = nccl.calls(&Library::all_reduce);
  std::atomic<bool> released{false};
  std::thread releases([&] {
    const auto is_called = [&] { return nccl.calls(&Library::all_reduce) > before; };
    EXPECT_TRUE(cuda::poll_until(is_called, soon()));
    released = true;
    nccl.release(0);
  });
  ASSERT_EQ(fake.begin_capture(streams[0]), CUDA_SUCCESS);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, cuda::record(streams[0]));
  EXPECT_TRUE(released) << "the call returned before the operation was enqueued";
  releases.join();
  op.done().wait(streams[0]);
  ASSERT_EQ(fake.end_capture(streams[0], graph), CUDA_SUCCESS);
  ASSERT_EQ(fake.launch(graph, streams[0]), CUDA_SUCCESS);
  const Op second = ranks[1]->all_reduce(floats(*b), ReduceOp::Sum, b, Fence());
  EXPECT_TRUE(second.done().synchronize(soon()));
  EXPECT_EQ(value_of(*b), 3);
  ASSERT_TRUE(cuda::record(streams[0]).synchronize(soon()));
  EXPECT_EQ(value_of(*a), 3);
}

TEST_F(NcclGraphTest, EnqueueTimeoutSparesTheCapture) {
  timeout = std::chrono::milliseconds(500);
  auto ranks = join(2);
  const auto a = number(1);
  nccl.hold(0);
  ASSERT_EQ(fake.begin_capture(streams[0]), CUDA_SUCCESS);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, cuda::record(streams[0]));
  ASSERT_TRUE(op.error());
  EXPECT_EQ(op.error()->blame(), Blame::Timeout);
  EXPECT_THAT(op.error()->text(), HasSubstr("while its stream was captured"));
  harness::FakeDriver::Graph graph;
  EXPECT_EQ(fake.end_capture(streams[0], graph), CUDA_SUCCESS);
  nccl.release(0);
}

TEST_F(NcclGraphTest, PinIsHeldDuringTheCapture) {
  auto ranks = join(2);
  auto a = number(1);
  const std::weak_ptr<cuda::DeviceMemory> watched = a;
  harness::FakeDriver::Graph graph;
  ASSERT_EQ(fake.begin_capture(streams[0]), CUDA_SUCCESS);
  const Op op = ranks[0]->all_reduce(floats(*a), ReduceOp::Sum, a, cuda::record(streams[0]));
  op.done().wait(streams[0]);
  a.reset();
  EXPECT_FALSE(
      loop->drive([&] { return watched.expired(); }, Deadline::in(std::chrono::milliseconds(20))))
      << "the next captured allocation could reuse its memory";
  ASSERT_EQ(fake.end_capture(streams[0], graph), CUDA_SUCCESS);
  EXPECT_TRUE(loop->drive([&] { return watched.expired(); }, soon()));
}

}  // namespace
}  // namespace weft::transport::nccl
