// SPDX-License-Identifier: Apache-2.0
// The inside of the fake driver: one mutex, the objects behind the handles, and one member function
// for each function of the table. Only fake_*.cc includes this.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include <weft/tests/harness/fake_driver.h>

namespace weft::harness {

// The functions of the table, numbered in its order.
enum class Function : std::size_t {
#define WEFT_FAKE_NUMBER(member, symbol) member,
  WEFT_CUDA_DRIVER_FUNCTIONS(WEFT_FAKE_NUMBER)
#undef WEFT_FAKE_NUMBER
      Count
};
inline constexpr auto kFunctions = static_cast<std::size_t>(Function::Count);
const char* name(Function function);

using Clock = std::chrono::steady_clock;

// True while this thread runs a host function or a kernel, which must not call CUDA.
extern thread_local bool inside_host_function;

// A primary context, from the first retain to the last release. Its objects die with it.
struct FakeContext {
  int device = 0;
  int retained = 0;
  bool destroyed = false;
  CUresult lost = CUDA_SUCCESS;
};

// One entry of a stream's queue. `ready` is called with the mutex locked, `run` without.
struct Operation {
  Function function;
  std::string text;
  std::function<CUresult()> run;
  std::function<bool()> ready = nullptr;  // null: always
  Clock::time_point not_before = {};
};

struct FakeStream;
struct Record;

// For each stream of a capture: how many of its operations come before something.
using Reach = std::map<const FakeStream*, std::size_t>;

// A capture from cuStreamBeginCapture to cuStreamEndCapture, and after that the graph.
struct FakeGraph {
  enum class Kind { Work, Record, Wait };
  struct Node {
    Kind kind;
    FakeStream* stream;
    Operation operation;             // for Work
    std::shared_ptr<Record> record;  // passed or awaited by the node; each launch has its own
  };
  FakeStream* origin = nullptr;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  bool ended = false;
  bool invalidated = false;
  std::vector<Node> nodes;
  std::map<FakeStream*, Reach> reaches;  // of the captured streams
  // The streams on which a launch runs work that was not captured from the origin.
  std::map<FakeStream*, FakeStream*> branches;
};

struct FakeStream {
  FakeContext* context = nullptr;
  std::shared_ptr<FakeGraph> capture;  // the capture that it is in
  int number = 0;                      // for messages
  std::deque<Operation> queue;
  std::uint64_t enqueued = 0;
  std::uint64_t finished = 0;
  bool running = false;
  bool held = false;
  bool destroyed = false;
  std::thread worker;  // with Options::threads, from the first operation
};

// The state that one cuEventRecord captured. Streams and the event share it, so a later record
// changes nothing for streams that already wait.
struct Record {
  std::atomic<bool> done{false};
  Clock::time_point passed;  // set before `done`
  FakeContext* context = nullptr;
  std::shared_ptr<FakeGraph> capture;  // of a record in a capture, which is never done
  Reach reach;                         // in that capture
};

struct FakeEvent {
  FakeContext* context = nullptr;
  std::shared_ptr<Record> last;  // null: never recorded
  bool destroyed = false;
  bool interprocess = false;
  bool timed = false;
  FakeEvent* original = nullptr;  // set for an event that was opened by its handle
};

struct Allocation {
  enum class Kind { Device, Pinned };
  enum class State {
    Coming,  // the stream has not yet reached the allocation
    Live,
    Freed
  };
  Kind kind;
  State state;
  FakeContext* context;
  std::uintptr_t base;
  std::size_t bytes;
  bool freeing = false;  // a free is enqueued
  void* mapping;
  std::size_t mapping_bytes;
  // The offset to a second mapping of the same bytes, if the first is out of reach.
  std::ptrdiff_t behind = 0;
  std::uint64_t id = 0;    // never used twice
  bool shareable = false;  // true for cuMemAlloc, not for pools
  int opened = 0;          // by "other processes"
  // For memory mapped to virtual addresses: its handle, and the GPUs that may access it.
  CUmemGenericAllocationHandle mapped = 0;
  std::vector<int> users;
};

// Memory of cuMemCreate: a file. It is kept after the memory is gone, because an exported
// descriptor may be imported late.
struct FakePhysical {
  int device = 0;
  std::size_t bytes = 0;
  bool exportable = false;
  std::pair<std::uint64_t, std::uint64_t> file;  // identifies the file: device and inode
};

// The handle of such memory. Its number is reused once it has neither references nor mappings.
struct FakeHandle {
  const FakePhysical* memory = nullptr;  // null: free
  int file = -1;
  int references = 0;
  int mappings = 0;
};

// Reserved virtual addresses. They stay reserved after they are freed.
struct FakeReservation {
  std::size_t bytes = 0;
  bool freed = false;
  std::ptrdiff_t behind = 0;  // the offset to where the bytes are accessible
};

struct FakePool {
  int device = 0;
  bool destroyed = false;
};

struct FakeKernel;

struct FakeLibrary {
  bool unloaded = false;
  std::map<std::string, FakeKernel*> kernels;
};

struct KernelDefinition {
  std::string name;
  std::vector<std::size_t> sizes;
  std::function<void(const FakeDriver::Launch&)> body;
};

struct FakeKernel {
  FakeLibrary* library = nullptr;
  const KernelDefinition* definition = nullptr;
  std::vector<FakeContext*> loaded;  // contexts that have loaded its code
};

// A kernel in one context.
struct FakeFunction {
  FakeKernel* kernel = nullptr;
  FakeContext* context = nullptr;
};

class FakeState {
 public:
  explicit FakeState(const FakeDriver::Options& options);
  ~FakeState();

  // --- the table's functions; they require `mutex`, and those that block unlock it meanwhile ---
  CUresult init(unsigned flags);
  CUresult driver_get_version(int* version);
  CUresult get_error_name(CUresult error, const char** text);
  CUresult get_error_string(CUresult error, const char** text);
  CUresult device_get_count(int* count);
  CUresult device_get(CUdevice* device, int ordinal);
  CUresult device_get_name(char* text, int length, CUdevice device);
  CUresult device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice device);
  CUresult device_primary_ctx_retain(CUcontext* context, CUdevice device);
  CUresult device_primary_ctx_release(CUdevice device);
  CUresult ctx_get_current(CUcontext* context);
  CUresult ctx_set_current(CUcontext context);
  CUresult ctx_get_stream_priority_range(int* least, int* greatest);
  CUresult ctx_synchronize();
  CUresult stream_create_with_priority(CUstream* stream, unsigned flags, int priority);
  CUresult stream_destroy(CUstream stream);
  CUresult stream_query(CUstream stream);
  CUresult stream_synchronize(CUstream stream);
  CUresult stream_wait_event(CUstream stream, CUevent event, unsigned flags);
  CUresult stream_wait_value32(CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned flags);
  CUresult stream_write_value32(CUstream stream, CUdeviceptr word, cuuint32_t value,
                                unsigned flags);
  CUresult stream_batch_mem_op(CUstream stream, unsigned count,
                               CUstreamBatchMemOpParams* operations, unsigned flags);
  CUresult event_create(CUevent* event, unsigned flags);
  CUresult event_destroy(CUevent event);
  CUresult event_record(CUevent event, CUstream stream);
  CUresult event_query(CUevent event);
  CUresult event_elapsed_time(float* milliseconds, CUevent from, CUevent to);
  CUresult stream_is_capturing(CUstream stream, CUstreamCaptureStatus* status);
  CUresult thread_exchange_stream_capture_mode(CUstreamCaptureMode* mode);
  CUresult event_synchronize(CUevent event);
  CUresult launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z,
                         unsigned shared_bytes, CUstream stream, void** parameters, void** extra);
  CUresult launch_host_func(CUstream stream, CUhostFn function, void* data);
  CUresult mem_host_alloc(void** memory, std::size_t bytes, unsigned flags);
  CUresult mem_free_host(void* memory);
  CUresult mem_host_get_device_pointer(CUdeviceptr* address, void* memory, unsigned flags);
  CUresult mem_alloc_async(CUdeviceptr* address, std::size_t bytes, CUstream stream);
  CUresult mem_alloc_from_pool_async(CUdeviceptr* address, std::size_t bytes, CUmemoryPool pool,
                                     CUstream stream);
  CUresult mem_free_async(CUdeviceptr address, CUstream stream);
  CUresult mem_pool_create(CUmemoryPool* pool, const CUmemPoolProps* properties);
  CUresult mem_pool_destroy(CUmemoryPool pool);
  CUresult mem_pool_set_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value);
  CUresult pointer_get_attribute(void* value, CUpointer_attribute attribute, CUdeviceptr address);
  CUresult device_get_uuid(CUuuid* uuid, CUdevice device);
  CUresult device_can_access_peer(int* can, CUdevice device, CUdevice peer);
  CUresult mem_alloc(CUdeviceptr* address, std::size_t bytes);
  CUresult mem_free(CUdeviceptr address);
  CUresult mem_get_address_range(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address);
  CUresult ipc_get_mem_handle(CUipcMemHandle* handle, CUdeviceptr address);
  CUresult ipc_open_mem_handle(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags);
  CUresult ipc_close_mem_handle(CUdeviceptr address);
  CUresult ipc_get_event_handle(CUipcEventHandle* handle, CUevent event);
  CUresult ipc_open_event_handle(CUevent* event, CUipcEventHandle handle);
  CUresult mem_create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                      const CUmemAllocationProp* properties, unsigned long long flags);
  CUresult mem_release(CUmemGenericAllocationHandle handle);
  CUresult mem_address_reserve(CUdeviceptr* address, std::size_t bytes, std::size_t alignment,
                               CUdeviceptr hint, unsigned long long flags);
  CUresult mem_address_free(CUdeviceptr address, std::size_t bytes);
  CUresult mem_map(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                   CUmemGenericAllocationHandle handle, unsigned long long flags);
  CUresult mem_unmap(CUdeviceptr address, std::size_t bytes);
  CUresult mem_set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* users,
                          std::size_t count);
  CUresult mem_retain_allocation_handle(CUmemGenericAllocationHandle* handle, void* address);
  CUresult mem_export_to_shareable_handle(void* exported, CUmemGenericAllocationHandle handle,
                                          CUmemAllocationHandleType type, unsigned long long flags);
  CUresult mem_import_from_shareable_handle(CUmemGenericAllocationHandle* handle, void* exported,
                                            CUmemAllocationHandleType type);
  CUresult mem_get_handle_for_address_range(void* handle, CUdeviceptr address, std::size_t bytes,
                                            CUmemRangeHandleType type, unsigned long long flags);
  CUresult flush_gpu_direct_rdma_writes(CUflushGPUDirectRDMAWritesTarget target,
                                        CUflushGPUDirectRDMAWritesScope scope);
  CUresult memcpy_async(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream);
  CUresult memset_d8_async(CUdeviceptr address, unsigned char byte, std::size_t bytes,
                           CUstream stream);
  CUresult library_load_data(CUlibrary* library, const void* image, CUjit_option* jit_options,
                             void** jit_values, unsigned jit_count, CUlibraryOption* options,
                             void** values, unsigned count);
  CUresult library_unload(CUlibrary library);
  CUresult library_get_kernel(CUkernel* kernel, CUlibrary library, const char* text);
  CUresult library_get_kernel_count(unsigned* count, CUlibrary library);
  CUresult library_enumerate_kernels(CUkernel* kernels, unsigned count, CUlibrary library);
  CUresult kernel_get_function(CUfunction* function, CUkernel kernel);
  CUresult kernel_get_param_info(CUkernel kernel, std::size_t index, std::size_t* offset,
                                 std::size_t* bytes);
  CUresult func_load(CUfunction function);

  // --- shared by the functions; they require `mutex` unless noted otherwise ---

  // Counts the call. Returns the error that the call must return at once, if there is one.
  CUresult enter(Function function);
  void complain(const std::string& text) { complaints.push_back(text); }
  // Refuses a call as the driver does, and records why it was wrong.
  CUresult refuse(CUresult result, const std::string& why);

  // Returns the thread's current context; null, with the error to return, if there is none or it
  // has ended.
  FakeContext* current(CUresult& error);
  // Returns the object behind a handle, which must be alive and of the current context; else null,
  // with the error to return.
  FakeStream* find(CUstream handle, CUresult& error);
  FakeEvent* find(CUevent handle, CUresult& error);
  FakeLibrary* find(CUlibrary handle, CUresult& error);

  // Graphs. check_captures() ends the captures that a call breaks: of this thread, and of other
  // threads unless this thread's mode spares them.
  CUresult begin_capture(FakeStream& stream, CUstreamCaptureMode mode);
  CUresult end_capture(FakeStream& stream, std::shared_ptr<FakeGraph>& graph);
  CUresult launch(FakeGraph& graph, FakeStream& stream);
  CUresult check_captures(Function function);
  CUresult break_capture(FakeGraph& capture, CUresult result, const std::string& why);
  void record_captured(FakeStream& stream, FakeEvent& event);
  CUresult wait_captured(FakeStream& stream, const std::shared_ptr<Record>& record);

  CUresult enqueue(CUstream handle, Operation operation);
  CUresult enqueue(FakeStream& stream, Operation operation);
  // True if the next operation may run now.
  bool ready(const FakeStream& stream) const;
  // Runs the next operation; unlocks the mutex meanwhile. False if there is none to run.
  bool step(FakeStream& stream, std::unique_lock<std::mutex>& lock);
  std::size_t run_all(std::unique_lock<std::mutex>& lock);
  bool idle(const FakeStream& stream) const { return stream.queue.empty() && !stream.running; }
  bool idle(const FakeContext& context) const;
  // Makes the host wait, as in cuCtxSynchronize. A wait that can never end is a complaint and an
  // error.
  CUresult block_until(const std::function<bool()>& done, const FakeContext& context,
                       Function function);
  // Ends the context and drops its queued work. Streams of other contexts that wait for it
  // continue.
  void lose(FakeContext& context, CUresult result);
  void work(FakeStream& stream);
  // Describes the enqueued work, for messages; empty if there is none.
  std::string describe_pending() const;
  // Complains about every stream of the context (null: all) that waits for something that will
  // never happen.
  void complain_of_hung(const FakeContext* context);
  CUresult enqueue_wait(CUstream stream, Function function, CUdeviceptr word, std::uint32_t value,
                        unsigned flags);
  CUresult enqueue_write(CUstream stream, Function function, CUdeviceptr word, std::uint32_t value);
  CUresult check_word(CUdeviceptr word, CUstream stream);

  // Returns the allocation, freed or not, that contains the address; null if there is none.
  Allocation* allocation_of(CUdeviceptr address);
  Allocation* allocate(Allocation::Kind kind, Allocation::State state, FakeContext* context,
                       std::size_t bytes);
  Allocation* allocate_again(FakeContext* context, std::size_t bytes);
  std::byte* behind(CUdeviceptr address);
  void unmap(Allocation& allocation);
  // check_range() checks at the call that [address, address + bytes) is inside one allocation, or
  // inside memory at adjacent virtual addresses that the stream's GPU may access. check_use()
  // checks when the operation runs that the memory is usable.
  CUresult check_range(CUdeviceptr address, std::size_t bytes, const char* what, CUstream stream);
  CUresult check_use(CUdeviceptr address, std::size_t bytes, const char* what);
  // Virtual memory.
  FakeHandle* find_handle(CUmemGenericAllocationHandle handle);
  CUmemGenericAllocationHandle give_handle(const FakePhysical* memory, int file);
  void drop_if_unused(FakeHandle& handle);
  FakeReservation* reservation_of(CUdeviceptr address, std::size_t bytes, CUdeviceptr& base);
  // Returns every live mapping that begins in the range.
  std::vector<Allocation*> mapped_in(CUdeviceptr address, std::size_t bytes);
  CUresult allocate_async(CUdeviceptr* address, std::size_t bytes, CUstream stream,
                          Function function);

  const FakeDriver::Options options;
  std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false;

  std::array<int, kFunctions> calls{};
  std::array<bool, kFunctions> held{};
  std::array<std::chrono::milliseconds, kFunctions> delays{};
  struct Failure {
    Function function;
    CUresult result;
    int after;  // the number of calls until it fails
  };
  std::vector<Failure> failures;
  int host_blocks = 0;
  std::vector<std::string> enqueued;
  std::vector<std::pair<const FakeStream*, std::string>> executed;
  std::vector<std::string> complaints;

  // Nothing here is removed while the driver lives, so that a stale handle is recognised.
  std::vector<std::unique_ptr<FakeContext>> contexts;
  std::vector<FakeContext*> primary;  // by device; null: not retained
  std::vector<std::unique_ptr<FakeStream>> streams;
  std::map<FakeContext*, FakeStream*> legacy_streams;
  std::vector<std::unique_ptr<FakeEvent>> events;
  std::vector<std::shared_ptr<FakeGraph>> captures;  // captures that have not ended
  std::map<std::uintptr_t, Allocation> allocations;  // by base
  std::uint64_t allocated = 0;
  std::vector<std::unique_ptr<FakePhysical>> physical;
  std::vector<FakeHandle> handles;  // by number, from 1
  std::map<std::uintptr_t, FakeReservation> reservations;
  std::vector<std::unique_ptr<FakePool>> pools;
  std::map<std::string, KernelDefinition> definitions;
  std::vector<std::unique_ptr<FakeLibrary>> libraries;
  std::vector<std::unique_ptr<FakeKernel>> kernels;
  std::vector<std::unique_ptr<FakeFunction>> functions;
};

// Returns the object of the list that the handle points to; null if there is none.
template <class Object, class Handle>
Object* object_of(const std::vector<std::unique_ptr<Object>>& list, Handle handle) {
  for (const auto& object : list) {
    if (reinterpret_cast<void*>(handle) == object.get()) return object.get();
  }
  return nullptr;
}

template <class Handle, class Object>
Handle handle_of(Object* object) {
  return reinterpret_cast<Handle>(object);
}

}  // namespace weft::harness
