// SPDX-License-Identifier: Apache-2.0
// Checkpoints of values on several GPUs of the fake driver: of one rank, and of an RPC job.
#include <future>
#include <optional>

#include <torch/serialize/archive.h>

#include <weft/checkpoint.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rpc/init.h>
#include <weft/rpc.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/lent_devices.h>

#include "../shard/on_fake_gpu.h"

namespace job_on_cuda {

using weft::fake_gpu::cuda_of_torch;
using weft::fake_gpu::driver;

c10::Device gpu(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }
at::Tensor made(int index, double value) {
  at::Tensor tensor = at::empty({3, 2}, at::TensorOptions(at::kFloat).device(gpu(index)));
  return tensor.fill_(value);
}
weft::cuda::StreamRef current(int index) {
  return cuda_of_torch->view(cuda_of_torch->current(index));
}
// Returns before the value is written: when the stream is released.
std::optional<weft::cuda::StreamRef> held;
void write_late(at::Tensor& tensor, double value) {
  held = current(tensor.device().index());
  driver->hold(*held);
  tensor.fill_(value);
}
// Its save() enqueues a copy.
struct Copied {
  explicit Copied(int index) : value(made(index, 1)) {}
  void save(torch::serialize::OutputArchive& archive) const {
    const at::Tensor copy = at::empty(value.sizes(), value.options());
    archive.write("value", copy.copy_(value), true);
  }
  void load(torch::serialize::InputArchive& archive) { archive.read("value", value, true); }
  at::Tensor value;
};
void write_object_late(Copied& object, double value) { write_late(object.value, value); }
void set_all(at::Tensor& tensor, double value) { tensor.fill_(value); }

void expect_all(const at::Tensor& tensor, float value) {
  weft::tensor::CudaDevices devices(driver->driver());
  EXPECT_TRUE(
      devices.ready(tensor.device()).synchronize(weft::Deadline::in(std::chrono::seconds(20))));
  const weft::fake_gpu::View values(tensor);
  for (std::int64_t i = 0; i < values.count; ++i) EXPECT_EQ(values[i], value) << i;
}

}  // namespace job_on_cuda

namespace weft {
namespace {

using namespace job_on_cuda;
using checkpoint::JobPart;

struct ValuesOfGpus : fake_gpu::OnFakeGpus {
  // Worker 0 runs `body`; both workers use both GPUs.
  void run_workers(const std::function<void(rpc::Agent&)>& body) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(2, [&](int rank) {
      const c10::MultiStreamGuard streams({torch_->new_stream(0), torch_->new_stream(1)});
      rpc::Options options{
          .rank = rank, .world_size = 2, .store = store, .timeout = std::chrono::seconds(20)};
      options.transports = {"inproc"};
      options.devices = {gpu(0), gpu(1)};
      rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options, lent_.lend(*fake_));
      if (rank == 1) owner_ = &agent;
      if (rank == 0) body(agent);
      agent.shutdown({.timeout = std::chrono::seconds(30)});
    });
    lent_.wait_until_given_back();
  }

  // Saves the owner's value while a stream that is to write it is held.
  template <class T>
  void save_behind(rpc::Agent& agent, const RRef<T>& value) {
    const auto served = owner_.load()->debug_info().calls_served;
    auto saving = std::async(std::launch::async, [&] {
      return checkpoint::save_async(folder_, agent, {{"value", value}});
    });
    // The owner has made its part and is told to copy it.
    EXPECT_TRUE(harness::comes_true(
        [&] { return owner_.load()->debug_info().calls_served >= served + 2; }));
    fake_->release(*held);
    saving.get().wait();
  }

  const harness::Folder temporary_;
  const std::string folder_ = temporary_.path() + "/run";
  harness::LentDevices lent_;
  std::atomic<rpc::Agent*> owner_{nullptr};
};

// One rank has values on both GPUs: each is copied in the order of its GPU's stream.
TEST_F(ValuesOfGpus, OfOneRankAreCopiedByEachGpusStream) {
  run([&](Rank& rank) {
    const int other = 1 - rank.number();
    const c10::StreamGuard guard(torch_->new_stream(other));
    at::Tensor mine = made(rank.number(), 1), others = made(other, 2);
    const std::vector<checkpoint::Part> parts = {{"mine", checkpoint::per_rank(mine)},
                                                 {"others", checkpoint::per_rank(others)}};
    const auto hold = [&](bool on) {
      for (const int gpu : {rank.number(), other})
        on ? fake_->hold(current(gpu)) : fake_->release(current(gpu));
    };
    for (const bool stages : {false, true}) {
      checkpoint::save_async(folder_, rank.group, parts, {.stage_on_gpu = stages}).wait();
      hold(true);
      mine.fill_(5);
      others.fill_(6);
      checkpoint::Saving saving =
          checkpoint::save_async(folder_, rank.group, parts, {.stage_on_gpu = stages});
      mine.fill_(9);
      others.fill_(9);
      EXPECT_FALSE(saving.query());
      meet();
      hold(false);
      saving.wait();
      checkpoint::load(folder_, rank.group, parts);
      expect_all(mine, 5);
      expect_all(others, 6);
    }
  });
}

TEST_F(ValuesOfGpus, OfAJobAreLoadedToTheirGpus) {
  run_workers([&](rpc::Agent& agent) {
    auto first = agent.remote<&made>(1, 0, 1.0), second = agent.remote<&made>(1, 1, 2.0);
    at::Tensor own = made(0, 3), own_second = made(1, 4);
    const std::vector<JobPart> parts = {
        {"first", first}, {"second", second}, {"own", own}, {"own_second", own_second}};
    checkpoint::save_async(folder_, agent, parts).wait();
    first.sync<&set_all>(9.0);
    second.sync<&set_all>(9.0);
    own.fill_(9);
    own_second.fill_(9);
    checkpoint::load(folder_, agent, parts);
    expect_all(own, 3);
    expect_all(own_second, 4);
    // A second checkpoint shows the values that the owner's tensors have now.
    checkpoint::save_async(folder_ + "2", agent, parts).wait();
    checkpoint::load(folder_ + "2", agent, {{"first", own}, {"second", own_second}});
    expect_all(own, 1);
    expect_all(own_second, 2);
  });
}

// A call has ended when it has enqueued its kernels, and they run on streams that the save does not
// know.
TEST_F(ValuesOfGpus, OfAJobAreThoseOfTheCallsBefore) {
  run_workers([&](rpc::Agent& agent) {
    auto value = agent.remote<&made>(1, 1, 1.0);
    value.sync<&write_late>(5.0);
    save_behind(agent, value);
    at::Tensor loaded = made(0, 0);
    checkpoint::load(folder_, agent, {{"value", loaded}});
    expect_all(loaded, 5);
  });
}

TEST_F(ValuesOfGpus, OfObjectsAreThoseOfTheCallsBefore) {
  run_workers([&](rpc::Agent& agent) {
    auto object = agent.remote<Copied>(1, 1);
    object.sync<&write_object_late>(5.0);
    save_behind(agent, object);
    Copied own(0);
    own.value = at::zeros({3, 2});
    checkpoint::load(folder_, agent, {{"value", own}});
    EXPECT_TRUE(at::equal(own.value, at::full({3, 2}, 5.0F)));
  });
}

}  // namespace
}  // namespace weft
