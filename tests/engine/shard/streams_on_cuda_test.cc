// SPDX-License-Identifier: Apache-2.0
// Units that a program uses on a stream of its own, and reductions beside kernels, on the fake
// driver's GPUs.
#include <algorithm>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <weft/profiling/trace/flight_recorder.h>

#include "on_fake_gpu.h"

namespace weft {
namespace {

using fake_gpu::cuda_of_torch;
using fake_gpu::expect_gradients;
using fake_gpu::Product;
using fake_gpu::View;
using StreamsOnCuda = fake_gpu::OnFakeGpus;

// The product of the input and the weights of the parts in `order`.
struct ProductOf : Product {
  using Product::Product;
  at::Tensor forward(at::Tensor x) {
    for (const std::size_t i : order) {
      x = x * parts[i]->weight;
      if (on_backward) x.register_hook([this, i](const at::Tensor&) { on_backward(i); });
    }
    return x;
  }
  std::vector<std::size_t> order = {0, 1, 2, 3};
  std::function<void(std::size_t part)> on_backward;  // before that of the part
};

// The product of the input's square and all weights, of which part 1 is taken on a side stream.
struct ProductOfTwoStreams : Product {
  ProductOfTwoStreams(c10::Device device, c10::Stream side) : Product(device), side(side) {}
  at::Tensor forward(const at::Tensor& x) {
    const c10::Stream main = cuda_of_torch->current(x.get_device());
    at::Tensor product = x * parts[0]->weight;
    wait_for(main, side);
    {
      const c10::StreamGuard guard(side);
      aside = x * parts[1]->weight;
    }
    product = product * parts[2]->weight;
    product = product * parts[3]->weight;
    wait_for(side, main);
    return aside * product;
  }
  static void wait_for(const c10::Stream& other, const c10::Stream& stream) {
    c10::Event event(c10::kCUDA);
    event.record(other);
    event.block(stream);
  }
  const c10::Stream side;
  at::Tensor aside;  // until the main stream has used it
};

template <class Rank>
void pass(FullyShardedDataParallel<ProductOf>& sharded, const Rank& rank) {
  sharded(rank.filled(static_cast<float>(rank.gpu.index() + 1))).backward(rank.filled(1));
}

// libtorch's thread for the GPU averages them when it ends the backward.
TEST_F(StreamsOnCuda, GradientsOfUnitsThatTheLastBackwardDoesNotUseAreAverages) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<ProductOf>(rank.gpu);
    FullyShardedDataParallel sharded(model, rank.group);
    model->order = {3};
    {
      const auto local = sharded.no_sync();
      pass(sharded, rank);
    }
    model->order = {0, 1, 2};
    pass(sharded, rank);
    rank.drain();
    const float expected[] = {1.5F * 3 * 4, 1.5F * 2 * 4, 1.5F * 2 * 3, 1.5F};
    for (std::size_t i = 0; i < model->parts.size(); ++i)
      EXPECT_EQ(View(model->parameters()[i].grad())[0], expected[i]) << i;
  });
}

// The unit's memory is freed on the main stream while its product is still to run on the side one.
TEST_F(StreamsOnCuda, AUnitOnASideStreamKeepsItsMemoryUntilItHasRun) {
  run([&](Rank& rank) {
    const torch::NoGradGuard no_grad;
    const auto model =
        std::make_shared<ProductOfTwoStreams>(rank.gpu, torch_->new_stream(rank.gpu.index()));
    const auto side = torch_->view(model->side);
    FullyShardedDataParallel sharded(model, rank.group);
    const auto input = static_cast<float>(rank.gpu.index() + 1);
    const at::Tensor x = rank.filled(input);
    sharded(x);  // from now on part 1 is gathered on the main stream, behind part 0
    rank.drain();
    meet();
    const int blocked = fake_->host_blocks();
    meet();
    fake_->hold(side);
    const at::Tensor product = sharded(x);
    EXPECT_EQ(fake_->host_blocks(), blocked);
    meet();
    fake_->release(side);
    rank.drain();
    EXPECT_EQ(View(product)[0], input * input * 2 * 3 * 4 * 5);
  });
}

// Behind that operation, on both ranks together.
std::ptrdiff_t ended_reductions(std::uint64_t after) {
  return std::ranges::count_if(
      trace::flight_recorder().read(), [after](const trace::Record& record) {
        return record.ticket > after && std::string_view(record.name) == "reduce_scatter" &&
               record.state == trace::State::Done;
      });
}

// The kernels of part 2's backward are enqueued and cannot run until part 3's gradients are there.
TEST_F(StreamsOnCuda, GradientsAreReducedBesideTheKernelsOfTheNextBackward) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<ProductOf>(rank.gpu);
    FullyShardedDataParallel sharded(model, rank.group);
    pass(sharded, rank);
    const auto before = operation_until_now(rank);
    const auto stream = rank.stream();
    model->on_backward = [&](std::size_t part) {
      if (part == 2) {
        rank.drain();  // until part 3's gradients are packed
        fake_->hold(stream);
      } else if (part == 1) {
        EXPECT_GT(fake_->pending(stream), 0U);
        meet();
        EXPECT_TRUE(harness::comes_true([&] { return ended_reductions(before) == 2; }))
            << "one unit on two ranks; there are " << ended_reductions(before);
        meet();
        fake_->release(stream);
      }
    };
    drop_gradients(*model);
    pass(sharded, rank);
    rank.drain();
    expect_gradients(*model, 2);
  });
}

}  // namespace
}  // namespace weft
