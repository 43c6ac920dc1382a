// SPDX-License-Identifier: Apache-2.0
// Every kind of part in a checkpoint of save_async().
#include <limits>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <weft/tests/harness/folder.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SavedParts : public ::testing::Test {
 protected:
  const harness::Folder temporary_;
  const std::string folder_ = temporary_.path() + "/run";
  static void run(int ranks, const harness::Body& body) {
    harness::run_ranks(harness::As::Threads, ranks, body);
  }
};

TEST_F(SavedParts, VariablesAndLists) {
  run(3, [&](ProcessGroup group) {
    bool flag = group.rank() == 0;
    std::uint8_t small = group.rank() == 0 ? 200 : 1;  // rank 0's value counts
    double real = 0.1;
    std::string text = "läuft";
    std::string empty;
    std::vector<bool> flags = {true, false, true};
    std::vector<std::uint64_t> large = {std::numeric_limits<std::uint64_t>::max()};
    std::vector<float> floats(100'000, 1.5F);
    std::vector<double> none;
    std::vector<torch::Tensor> list = {torch::ones({2}), torch::zeros({}, torch::kLong)};
    torch::Tensor complex = torch::full({2, 3}, c10::complex<double>(1, 2), torch::kComplexDouble);
    torch::Tensor leaf = torch::ones({3}).set_requires_grad(true);
    std::vector<checkpoint::Part> parts = {{"flag", flag},   {"small", small},     {"real", real},
                                           {"text", text},   {"empty", empty},     {"flags", flags},
                                           {"large", large}, {"floats", floats},   {"none", none},
                                           {"list", list},   {"complex", complex}, {"leaf", leaf}};
    checkpoint::save_async(folder_, group, parts).wait();
    flag = false;
    small = 0;
    real = 0;
    text.clear();
    empty = "not";
    flags.clear();
    large.clear();
    floats.clear();
    none = {1};
    list.clear();
    const torch::Tensor saved = complex.clone();
    complex.zero_();
    leaf = torch::Tensor();
    checkpoint::load(folder_, group, parts);
    EXPECT_TRUE(flag);
    EXPECT_EQ(small, 200);
    EXPECT_EQ(real, 0.1);
    EXPECT_EQ(text, "läuft");
    EXPECT_EQ(empty, "");
    EXPECT_THAT(flags, ElementsAre(true, false, true));
    EXPECT_THAT(large, ElementsAre(std::numeric_limits<std::uint64_t>::max()));
    EXPECT_EQ(floats, std::vector<float>(100'000, 1.5F));
    EXPECT_TRUE(none.empty());
    expect_equal(list, {torch::ones({2}), torch::zeros({}, torch::kLong)});
    EXPECT_TRUE(torch::equal(complex, saved));
    ASSERT_TRUE(leaf.defined());
    EXPECT_TRUE(leaf.requires_grad());
    // One that cannot hold what was saved.
    std::vector<int> other;
    std::int8_t tiny = 0;
    EXPECT_THAT(
        refused(group, Blame::Caller,
                [&] {
                  checkpoint::load(folder_, group, {{"floats", other}});
                }),
        HasSubstr("part 'floats': it is Float [100000] in the file and a list of numbers of "
                  "type Int here"));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(folder_, group, {{"small", tiny}});
                        }),
                HasSubstr("of a type that cannot hold it"));
    EXPECT_THAT(
        refused(group, Blame::Caller,
                [&] {
                  checkpoint::load(folder_, group, {{"list", tiny}});
                }),
        HasSubstr("part 'list' is a list of tensors in the checkpoint and a variable here"));
  });
}

TEST_F(SavedParts, AllDtypes) {
  run(2, [&](ProcessGroup group) {
    std::vector<torch::Tensor> all;
    for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                             at::kShort, at::kChar, at::kByte, at::kBool, at::kUInt16, at::kUInt32,
                             at::kUInt64, at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2})
      all.push_back(torch::arange(6).reshape({2, 3}).to(dtype));
    all.push_back(torch::arange(12).reshape({3, 4}).t());  // not contiguous
    checkpoint::save_async(folder_, group, {{"all", all}}).wait();
    std::vector<torch::Tensor> read;
    checkpoint::load(folder_, group, {{"all", read}});
    ASSERT_EQ(read.size(), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(read[i].scalar_type(), all[i].scalar_type());
      EXPECT_EQ(read[i].sizes(), all[i].sizes());
      EXPECT_TRUE(torch::equal(read[i].contiguous().view(torch::kByte),
                               all[i].contiguous().view(torch::kByte)))
          << all[i].scalar_type();
    }
  });
}

TEST_F(SavedParts, DeferredOperationsAreApplied) {
  run(2, [&](ProcessGroup group) {
    const torch::Tensor ones = torch::ones({3});
    const torch::Tensor complex = torch::complex(ones, ones);
    std::vector<torch::Tensor> all = {complex.conj(), ones._neg_view(),
                                      at::_efficientzerotensor({3}, at::TensorOptions(at::kFloat))};
    EXPECT_TRUE(all[0].is_conj());
    EXPECT_TRUE(all[1].is_neg());
    EXPECT_TRUE(all[2]._is_zerotensor());
    checkpoint::save_async(folder_, group, {{"all", all}}).wait();
    std::vector<torch::Tensor> read;
    checkpoint::load(folder_, group, {{"all", read}});
    expect_equal(read, {torch::complex(ones, -ones), -ones, torch::zeros({3})});
  });
}

template <class Optimizer, class Options>
void comes_back(const std::string& folder, ProcessGroup& group, const Options& options) {
  Mlp net;
  fill(net);
  Optimizer optimizer(net->parameters(), options);
  const auto go_on = [](const Mlp& some, torch::optim::Optimizer& with, int from, int to) {
    for (int step = from; step < to; ++step) {
      set_gradients(some->parameters(), step);
      with.step([] { return torch::zeros({}); });
    }
  };
  go_on(net, optimizer, 0, 3);
  checkpoint::Saving saving =
      checkpoint::save_async(folder, group, {{"model", net}, {"optimizer", optimizer}});
  go_on(net, optimizer, 3, 6);
  saving.wait();
  Mlp again;
  Optimizer other(again->parameters(), Options(0.5));
  checkpoint::load(folder, group, {{"model", again}, {"optimizer", other}});
  go_on(again, other, 3, 6);
  expect_equal(values_of(*again), values_of(*net));
}

TEST_F(SavedParts, OptimizersOfLibtorch) {
  run(2, [&](ProcessGroup group) {
    comes_back<torch::optim::SGD>(folder_, group, torch::optim::SGDOptions(0.01).momentum(0.9));
    comes_back<torch::optim::Adam>(folder_, group, torch::optim::AdamOptions(0.01).amsgrad(true));
    comes_back<torch::optim::AdamW>(folder_, group,
                                    torch::optim::AdamWOptions(0.01).betas({0.8, 0.9}));
    comes_back<torch::optim::RMSprop>(folder_, group, torch::optim::RMSpropOptions(0.01));
    comes_back<torch::optim::Adagrad>(folder_, group, torch::optim::AdagradOptions(0.01));
    comes_back<torch::optim::LBFGS>(
        folder_, group, torch::optim::LBFGSOptions(0.01).line_search_fn("strong_wolfe"));
  });
}

TEST_F(SavedParts, SamplerContinuesOnOtherRanks) {
  std::vector<std::vector<std::size_t>> taken(6);
  run(2, [&](ProcessGroup group) {
    DistributedSampler sampler(24, group, {.seed = 3});
    sampler.set_epoch(5);
    taken[static_cast<std::size_t>(group.rank())] = *sampler.next(6);
    checkpoint::save_async(folder_, group, {{"sampler", sampler}}).wait();
    const auto rest = *sampler.next(100);
    DistributedSampler again(24, group, {.seed = 3});
    checkpoint::load(folder_, group, {{"sampler", again}});
    EXPECT_EQ(again.next(100), rest);
  });
  run(4, [&](ProcessGroup group) {
    DistributedSampler sampler(24, group, {.seed = 3});
    checkpoint::load(folder_, group, {{"sampler", sampler}});
    taken[static_cast<std::size_t>(2 + group.rank())] = *sampler.next(100);
  });
  std::vector<std::size_t> all;
  for (const auto& some : taken) all.insert(all.end(), some.begin(), some.end());
  std::ranges::sort(all);
  std::vector<std::size_t> each(24);
  std::iota(each.begin(), each.end(), 0);
  EXPECT_EQ(all, each);  // no example is left out, none comes twice
}

struct Indices : torch::data::datasets::Dataset<Indices, std::size_t> {
  std::size_t get(std::size_t index) override { return index; }
  std::optional<std::size_t> size() const override { return 24; }
};

TEST_F(SavedParts, DataLoaderContinuesInTheEpoch) {
  run(2, [&](ProcessGroup group) {
    const auto loader_of = [](DistributedSampler& sampler) {
      return torch::data::make_data_loader(Indices(), sampler, torch::data::DataLoaderOptions(3));
    };
    const auto rest_of = [](auto& loader, auto& at) {
      std::vector<std::vector<std::size_t>> batches;
      for (; at != loader->end(); ++at) batches.push_back(*at);
      return batches;
    };
    DistributedSampler sampler(24, group);
    auto loader = loader_of(sampler);
    sampler.set_epoch(4);
    auto at = loader->begin();
    ++at;
    checkpoint::save_async(folder_, group, {{"sampler", sampler}}).wait();
    ++at;
    const auto rest = rest_of(loader, at);
    DistributedSampler again(24, group);
    checkpoint::load(folder_, group, {{"sampler", again}});
    auto other = loader_of(again);
    again.set_epoch(4);
    auto from = other->begin();
    EXPECT_EQ(*from, rest.front());
    checkpoint::save_async(folder_, group, {{"sampler", again}}).wait();
    ++from;
    const auto last = rest_of(other, from);
    EXPECT_EQ(last, std::vector(rest.begin() + 1, rest.end()));
    EXPECT_EQ(rest.size(), 2);
    checkpoint::load(folder_, group, {{"sampler", again}});  // of the second save
    from = other->begin();
    EXPECT_EQ(rest_of(other, from), last);
    again.set_epoch(5);
    from = other->begin();
    EXPECT_EQ(rest_of(other, from).size(), 4);
  });
}

TEST_F(SavedParts, GeneratorsAndSchedulers) {
  run(2, [&](ProcessGroup group) {
    const auto seed = 10 + static_cast<std::uint64_t>(group.rank());
    torch::Generator own = at::make_generator<at::CPUGeneratorImpl>(seed);
    torch::Generator common = at::make_generator<at::CPUGeneratorImpl>(3);
    Mlp net;
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.8));
    torch::optim::StepLR steps(sgd, 2, 0.5);
    torch::optim::ReduceLROnPlateauScheduler plateau(
        sgd, torch::optim::ReduceLROnPlateauScheduler::min, 0.1, 1);
    steps.step();
    plateau.step(1);
    plateau.step(2);
    const std::vector<checkpoint::Part> parts = {{"own", checkpoint::per_rank(own)},
                                                 {"common", common},
                                                 {"sgd", sgd},
                                                 {"steps", steps},
                                                 {"plateau", plateau}};
    checkpoint::save_async(folder_, group, parts).wait();
    const auto draw = [&] {
      return std::vector<torch::Tensor>{at::rand({3}, own), at::rand({3}, common)};
    };
    const auto rate = [&] { return sgd.param_groups()[0].options().get_lr(); };
    const auto drawn = draw();
    const auto go_on = [&] {
      std::vector<double> rates;
      for (int i = 0; i < 4; ++i) {
        steps.step();
        plateau.step(2);
        rates.push_back(rate());
      }
      return rates;
    };
    const auto rates = go_on();
    EXPECT_LT(rates.back(), rates.front());
    checkpoint::load(folder_, group, parts);
    EXPECT_EQ(rate(), 0.8);
    expect_equal(draw(), drawn);
    EXPECT_EQ(go_on(), rates);
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(folder_, group, {{"common", steps}});
                        }),
                HasSubstr("there is no integer 'step_count'"));
  });
}

TEST_F(SavedParts, PerRankPartsOnOtherRanks) {
  run(2, [&](ProcessGroup group) {
    int number = 10 + group.rank();
    std::string name = "rank " + std::to_string(group.rank());
    std::vector<int> list(static_cast<std::size_t>(group.rank()), 7);
    checkpoint::save_async(folder_, group,
                           {checkpoint::per_rank({"number", number}),
                            {"name", checkpoint::per_rank(name)},
                            {"list", checkpoint::per_rank(list)}})
        .wait();
  });
  run(3, [&](ProcessGroup group) {
    int number = 0;
    std::string name = "kept";
    std::vector<int> list;
    checkpoint::load(folder_, group,
                     {{"number", checkpoint::per_rank(number)},
                      {"name", checkpoint::per_rank(name)},
                      {"list", checkpoint::per_rank(list)}});
    if (group.rank() < 2) {
      EXPECT_EQ(number, 10 + group.rank());
      EXPECT_EQ(name, "rank " + std::to_string(group.rank()));
      EXPECT_EQ(list.size(), static_cast<std::size_t>(group.rank()));
    } else {
      EXPECT_EQ(number, 0);
      EXPECT_EQ(name, "kept");
    }
    harness::meet(group);
    EXPECT_THAT(
        refused(
            group, Blame::Caller,
            [&] {
              checkpoint::save(folder_ + ".pt", group, {{"number", checkpoint::per_rank(number)}});
            }),
        HasSubstr("part 'number' of the checkpoint cannot be saved: it is per_rank()"));
  });
}

// Another object of the program, with tensors of its own.
struct Average {
  torch::Tensor mean = torch::zeros({4});
  std::int64_t count = 0;
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("mean", mean, true);
    archive.write("count", c10::IValue(count));
  }
  void load(torch::serialize::InputArchive& archive) {
    archive.read("mean", mean, true);
    c10::IValue value;
    archive.read("count", value);
    count = value.toInt();
  }
};

TEST_F(SavedParts, ObjectsInBothForms) {
  run(2, [&](ProcessGroup group) {
    Average average;
    std::vector<int> numbers = {1, 2};
    torch::Generator random = at::make_generator<at::CPUGeneratorImpl>(3);
    average.mean.fill_(2);
    average.count = 5;
    const std::vector<checkpoint::Part> parts = {
        {"average", average}, {"numbers", numbers}, {"random", random}};
    checkpoint::save_async(folder_, group, parts).wait();
    checkpoint::save(folder_ + ".pt", group, parts);
    const torch::Tensor drawn = at::rand({3}, random);
    for (const std::string& path : {folder_, folder_ + ".pt"}) {
      harness::meet(group);
      average.mean.fill_(0);
      average.count = 0;
      numbers.clear();
      checkpoint::load(path, group, parts);
      EXPECT_TRUE(torch::equal(average.mean, torch::full({4}, 2.0F)));
      EXPECT_EQ(average.count, 5);
      EXPECT_THAT(numbers, ElementsAre(1, 2));
      EXPECT_TRUE(torch::equal(at::rand({3}, random), drawn));
    }
  });
}

struct Listed {
  c10::IValue list;
  void save(torch::serialize::OutputArchive& archive) const { archive.write("list", list); }
  void load(torch::serialize::InputArchive& archive) { archive.read("list", list); }
};

c10::IValue list_of(const std::vector<std::string>& texts) {
  return c10::IValue(c10::List<std::string>(texts));
}

TEST_F(SavedParts, ListsOfTextsComeBackOrAreRefused) {
  run(2, [&](ProcessGroup group) {
    Listed listed{list_of({"a", "", "b c"})};
    const auto save = [&] { checkpoint::save_async(folder_, group, {{"listed", listed}}).wait(); };
    save();
    listed.list = list_of({});
    checkpoint::load(folder_, group, {{"listed", listed}});
    EXPECT_TRUE(listed.list == list_of({"a", "", "b c"}));
    for (const c10::IValue& other :
         {list_of({"two\nlines"}), c10::IValue(c10::List<std::int64_t>())}) {
      listed.list = other;
      EXPECT_THAT(refused(group, Blame::Caller, save),
                  HasSubstr("which save_async cannot write; use checkpoint::save"));
    }
  });
}

}  // namespace
}  // namespace weft::testing
