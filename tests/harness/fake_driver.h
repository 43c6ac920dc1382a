// SPDX-License-Identifier: Apache-2.0
// A CUDA driver made of host memory and queues, behind the same table as the real one
// (cuda/driver.h). With it, every rule of order and lifetime is tested on machines without a GPU.
//
// Streams are ordered queues. Either the test steps them (the default: nothing runs until the test
// says so, so any interleaving can be written down), or each runs on its own thread
// (Options::threads: for races and sanitizers). Device memory is host memory, so a test reads it
// with a pointer; freed memory becomes unreadable and unwritable.
//
// It behaves as the driver's documentation says: an event that was never recorded has passed, a
// waiting stream keeps the record it was given, a destroyed stream finishes its work, freeing
// pinned memory waits for the device, a kernel that was not loaded waits for the device at its
// first launch, an error inside a kernel ends the context. In three places it is stricter than the
// driver: a call requires the context of its stream to be current; a destroyed handle is recognised
// forever; and blocking streams (without CU_STREAM_NON_BLOCKING) and the per-thread default stream
// are refused. Because no stream blocks, the legacy default stream is an ordinary queue.
//
// Misuse that the real driver would punish with a crash, a hang or garbage is a complaint.
// Complaints that no test has taken fail the test when the FakeDriver is destroyed.
//
// One at a time, because the driver's functions have no pointer to their driver; a second one
// throws. Any thread may call every function.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <weft/cuda/driver.h>
#include <weft/cuda/library.h>
#include <weft/cuda/stream.h>

namespace weft::harness {

class FakeState;
struct FakeGraph;

class FakeDriver {
 public:
  struct Options {
    int devices = 1;
    bool threads = false;  // one thread for each stream, instead of step() and run()
    std::size_t device_bytes = std::size_t{1} << 30;  // of each device
    bool stream_mem_ops = true;
    bool flush_remote_writes = true;
    bool memory_pools = true;
    bool dma_buf = true;
    // How the GPUs see a NIC's writes (CU_GPU_DIRECT_RDMA_WRITES_ORDERING_…), and whether the host
    // can flush these writes.
    int remote_writes_order = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
    bool host_flushes = true;
    bool peer_access = true;  // between the devices
    // True: this process may open its own handles, as if it were another process; the driver
    // refuses that.
    bool is_two_processes = false;
    // True: cuMemAlloc reuses the address of freed memory of the same size.
    bool reuses_addresses = false;
    // True: the host faults when it touches device memory, as with a GPU's; tests access it through
    // behind().
    bool is_out_of_reach = false;
    // A call that makes the host wait longer than this counts as one that never returns.
    std::chrono::milliseconds longest_block = std::chrono::seconds(20);
  };

  FakeDriver() : FakeDriver(Options{}) {}
  explicit FakeDriver(Options options);
  // Fails the current test for every complaint that was not taken.
  ~FakeDriver();
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  // The table. Calls through it return CUDA_ERROR_DEINITIALIZED once the FakeDriver is destroyed.
  std::shared_ptr<const cuda::Driver> driver() const;

  // --- running (without threads)

  // Runs the next operation of the stream. False if there is none, or it is held, or it waits for
  // something.
  bool step(const cuda::StreamRef& stream);
  // Steps the stream, or all streams in turn, until nothing can continue; returns the number of
  // operations that ran.
  std::size_t run(const cuda::StreamRef& stream);
  std::size_t run();
  // Returns the number of operations in the stream, or in all streams, including the running one.
  std::size_t pending(const cuda::StreamRef& stream) const;
  std::size_t pending() const;

  // --- holding back and failing; functions are named as &cuda::Driver::memcpy_async

  // Keeps the stream, or every operation of that function, from running until it is released.
  void hold(const cuda::StreamRef& stream);
  void release(const cuda::StreamRef& stream);
  template <class F>
  void hold(F cuda::Driver::*function) {
    hold_function(index_of(function), true);
  }
  template <class F>
  void release(F cuda::Driver::*function) {
    hold_function(index_of(function), false);
  }
  // Makes operations of that function that are enqueued from now on ready only after `time`.
  template <class F>
  void delay(F cuda::Driver::*function, std::chrono::milliseconds time) {
    delay_function(index_of(function), time);
  }
  // Makes the n-th call of the function from now on (1: the next) fail with `result` and do
  // nothing.
  template <class F>
  void fail(F cuda::Driver::*function, CUresult result, int nth = 1) {
    fail_function(index_of(function), result, nth);
  }
  // Acts as if a kernel had crashed: the device's context ends with that error, and enqueued work
  // never runs.
  void lose_context(int device, CUresult result = CUDA_ERROR_ILLEGAL_ADDRESS);

  // --- other libraries

  // Enqueues work as a library with its own kernels does, whatever context is current. It runs once
  // `ready` is true (called under the driver's mutex; null: always). It is held and delayed
  // together with launch_kernel.
  CUresult enqueue(CUstream stream, const std::string& name, std::function<void()> run,
                   std::function<bool()> ready = nullptr);

  // --- graphs

  // Do what a program, or libtorch for it, does: cuStreamBeginCapture, cuStreamEndCapture,
  // cuGraphLaunch. Work and events can be captured; memory cannot. Branches of a graph run on
  // separate streams.
  using Graph = std::shared_ptr<FakeGraph>;
  CUresult begin_capture(const cuda::StreamRef& stream,
                         CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL);
  CUresult end_capture(const cuda::StreamRef& stream, Graph& graph);
  CUresult launch(const Graph& graph, const cuda::StreamRef& stream);

  // --- kernels

  struct Launch {
    cuda::Dim3 grid;
    cuda::Dim3 block;
    unsigned shared_bytes = 0;
    std::vector<void*> parameters;  // point to copies made when the kernel was launched
  };
  // Gives every library a kernel of that name: one call of `body` stands for the whole grid. A body
  // that throws ends the context. Call it before the library is loaded.
  void define_kernel(const std::string& name, std::vector<std::size_t> parameter_sizes,
                     std::function<void(const Launch&)> body);
  // The same with types: define_kernel<float*, float, std::size_t>("scale", [](float* x, float
  // factor, std::size_t n) {…}).
  template <class... Parameters, class Body>
  requires std::is_invocable_v<Body, Parameters...>
  void define_kernel(const std::string& name, Body body) {
    define_kernel(name, {sizeof(Parameters)...},
                  [body = std::move(body)](const Launch& launch) mutable {
                    [&]<std::size_t... I>(std::index_sequence<I...>) {
                      body(*static_cast<Parameters*>(launch.parameters[I])...);
                    }
                    (std::index_sequence_for<Parameters...>{});
                  });
  }

  // --- inspecting

  // Returns how often the function was called, including failed calls.
  template <class F>
  int calls(F cuda::Driver::*function) const {
    return calls_of(index_of(function));
  }
  // Returns how many calls made the host wait for the device, or may have: the three synchronising
  // functions, allocating and freeing pinned memory, unloading code, launching a kernel that was
  // not loaded, copies of pageable memory.
  int host_blocks() const;
  // Return the operations that were enqueued, and those that have run, in order, of all streams or
  // of one: "cuMemcpyAsync", "cuLaunchKernel scale".
  std::vector<std::string> enqueued() const;
  std::vector<std::string> executed() const;
  std::vector<std::string> executed(const cuda::StreamRef& stream) const;
  // Empties both lists, which become long in a long run.
  void forget();
  // Returns where the bytes at an address of device memory are accessible; any other address
  // itself.
  std::byte* behind(const void* address) const;
  // Counts the living objects.
  struct Alive {
    std::size_t streams = 0;
    std::size_t events = 0;
    std::size_t device_allocations = 0;
    std::size_t pinned_allocations = 0;
    std::size_t pools = 0;
    std::size_t libraries = 0;
    std::size_t contexts = 0;
    std::size_t physical_memories = 0;  // of cuMemCreate, with any holder
    std::size_t mappings = 0;           // to virtual addresses
    std::size_t reservations = 0;       // of virtual addresses
  };
  Alive alive() const;
  // Returns the complaints so far, which then count as expected.
  std::vector<std::string> take_complaints();

 private:
  // The index of a function in the table.
  template <class F>
  static std::size_t index_of(F cuda::Driver::*function) {
    static_assert(std::is_pointer_v<F>, "name a function of the table");
    const cuda::Driver table;
    const auto* slot = reinterpret_cast<const std::byte*>(&(table.*function));
    return static_cast<std::size_t>(slot - reinterpret_cast<const std::byte*>(&table)) /
           sizeof(void*);
  }
  void hold_function(std::size_t index, bool held);
  void delay_function(std::size_t index, std::chrono::milliseconds time);
  void fail_function(std::size_t index, CUresult result, int nth);
  int calls_of(std::size_t index) const;

  std::unique_ptr<FakeState> state_;
  std::shared_ptr<const cuda::Driver> table_;
};

}  // namespace weft::harness
