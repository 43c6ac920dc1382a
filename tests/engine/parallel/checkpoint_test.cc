// Checkpoints: that a job goes on from one as if nothing had happened, that nothing is half saved or half loaded, and that
// all ranks hear the same.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <weft/engine/parallel/checkpoint_file.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/killed_anywhen.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

namespace fs = std::filesystem;

std::string content_of(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void put(const std::string& file, const std::string& content) { std::ofstream(file, std::ios::binary) << content; }

std::set<std::string> files_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

// --- the file --------------------------------------------------------------------------------------------------------

void write_file(const std::string& file, const std::string& content) {
  checkpoint::Draft draft(file);
  draft.write(content.data(), content.size());
  draft.publish();
}

std::string read_file(const std::string& file) {
  checkpoint::Reader reader(file);
  std::string content(reader.bytes(), '\0');
  reader.read(content.data());
  return content;
}

// Runs it in a process of its own, which exits with what it returns.
pid_t in_process(const std::function<int()>& body) {
  const pid_t process = ::fork();
  if (process == 0) ::_exit(body());
  return process;
}

int exit_code_of(pid_t process) {
  int status = 0;
  ::waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The blame of what it throws, or 100.
int blame_of(const std::function<void()>& call) {
  try {
    call();
    return 100;
  } catch (const Error& error) {
    return static_cast<int>(error.blame());
  }
}

TEST(CheckpointFile, GivesBackWhatWasWritten) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  for (const std::string& content : {std::string(), std::string("\0\n", 2), std::string(100'000, 'x')}) {
    write_file(file, content);
    EXPECT_EQ(read_file(file), content);
  }
  EXPECT_EQ(files_in(folder.path()), std::set<std::string>{"a"});
}

TEST(CheckpointFile, OfWhichAByteIsMissingOrOtherwiseIsRefused) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  write_file(file, "some content");
  const std::string whole = content_of(file);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    put(file, whole.substr(0, bytes));
    EXPECT_EQ(harness::error_of([&] { read_file(file); }).blame(), Blame::Caller) << bytes;
    for (const int bit : {0, 5}) {
      std::string flipped = whole;
      flipped[bytes] = static_cast<char>(flipped[bytes] ^ (1 << bit));
      put(file, flipped);
      EXPECT_EQ(harness::error_of([&] { read_file(file); }).blame(), Blame::Caller) << bytes;
    }
  }
  put(file, whole + "x");
  EXPECT_EQ(harness::error_of([&] { read_file(file); }).blame(), Blame::Caller);
  put(file, whole.substr(1));
  EXPECT_THAT(harness::error_of([&] { read_file(file); }).what(), HasSubstr("is damaged"));
}

TEST(CheckpointFile, IsTheOldOneOrTheNewOneWhenItsWriterIsKilled) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  const auto content = [](int i) { return std::string(300'000, static_cast<char>('a' + i % 26)) + std::to_string(i); };
  write_file(file, content(0));
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    const pid_t writer = in_process([&] {
      for (int i = 0;; ++i) write_file(file, content(i));
      return 0;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    ::kill(writer, SIGKILL);
    exit_code_of(writer);
    const std::string found = read_file(file);
    EXPECT_EQ(found, content(std::stoi(found.substr(300'000))));
  }
  write_file(file, "next");  // in spite of what they have left
  EXPECT_EQ(read_file(file), "next");
  EXPECT_EQ(files_in(folder.path()), std::set<std::string>{"a"});
}

TEST(CheckpointFile, StaysWhereTheDiskIsFull) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  write_file(file, "old");
  const pid_t writer = in_process([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100'000, 100'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return blame_of([&] { write_file(file, std::string(200'000, 'x')); });
  });
  EXPECT_EQ(exit_code_of(writer), static_cast<int>(Blame::Busy));
  EXPECT_EQ(read_file(file), "old");
  EXPECT_EQ(files_in(folder.path()), std::set<std::string>{"a"});
}

TEST(CheckpointFile, KeepsItsPermissionsAndTheLinksToIt) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  write_file(file, "old");
  ::chmod(file.c_str(), 0640);
  fs::create_directory(folder.path() + "/links");
  fs::create_symlink("../second", folder.path() + "/links/first");
  fs::create_symlink("a", folder.path() + "/second");
  write_file(folder.path() + "/links/first", "new");
  EXPECT_EQ(read_file(file), "new");
  EXPECT_TRUE(fs::is_symlink(folder.path() + "/links/first"));
  EXPECT_TRUE(fs::is_symlink(folder.path() + "/second"));
  EXPECT_EQ(fs::status(file).permissions(), fs::perms(0640));
  fs::create_symlink("b", folder.path() + "/dangling");
  write_file(folder.path() + "/dangling", "there");
  EXPECT_EQ(read_file(folder.path() + "/b"), "there");
}

TEST(CheckpointFile, IsNotWrittenWhereItCannotBe) {
  const harness::Folder folder;
  fs::create_symlink("loop", folder.path() + "/loop");
  for (const std::string& file :
       {std::string(), folder.path(), folder.path() + "/missing/a", std::string("/proc/a"), std::string("/dev/null"),
        folder.path() + "/loop", folder.path() + "/" + std::string(252, 'x')}) {
    const Error error = harness::error_of([&] { write_file(file, "x"); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.what(), HasSubstr("the checkpoint '" + file + "' cannot be written: "));
  }
  EXPECT_EQ(files_in(folder.path()), std::set<std::string>{"loop"});
}

TEST(CheckpointFile, IsNotReplacedWhereItIsReadOnly) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  write_file(file, "old");
  ::chmod(file.c_str(), 0444);
  ::chmod(folder.path().c_str(), 0777);
  const pid_t writer = in_process([&] {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::seteuid(kNobody) != 0) return 101;  // root may write everything
    return blame_of([&] { write_file(file, "new"); });
  });
  EXPECT_EQ(exit_code_of(writer), static_cast<int>(Blame::Caller));
  EXPECT_EQ(read_file(file), "old");
}

TEST(CheckpointFile, HasOneWriterAtATime) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/a";
  {
    checkpoint::Draft first(file);
    first.write("one", 3);
    const Error error = harness::error_of([&] { checkpoint::Draft second(file); });
    EXPECT_EQ(error.blame(), Blame::Busy);
    EXPECT_THAT(error.what(), HasSubstr("another process is writing it"));
    first.publish();
  }
  EXPECT_EQ(read_file(file), "one");
  write_file(file, "two");
  EXPECT_EQ(read_file(file), "two");
}

// --- what is in it ---------------------------------------------------------------------------------------------------

class Checkpoint : public ::testing::TestWithParam<harness::As> {
 protected:
  const harness::Folder folder_;
  const std::string file_ = folder_.path() + "/run.pt";
  void run(int ranks, const harness::Body& body, const ProcessGroupOptions& options = {}) {
    harness::run_ranks(GetParam(), ranks, body, options);
  }
};
INSTANTIATE_TEST_SUITE_P(As, Checkpoint, ::testing::Values(harness::As::Threads, harness::As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

// With buffers, of another dtype too, and a parameter that is known by two names.
struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : body(register_module("body", Mlp())),
        norm(register_module("norm", torch::nn::BatchNorm1d(3))),
        tied(register_parameter("tied", body->first->weight)) {
    norm->to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) { return norm(body(x)) + tied.sum(); }
  Mlp body;
  torch::nn::BatchNorm1d norm;
  torch::Tensor tied;
};
TORCH_MODULE(Normed);

std::vector<torch::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> values;
  for (const auto& tensor : module.parameters()) values.push_back(tensor.detach().clone());
  for (const auto& tensor : module.buffers()) values.push_back(tensor.detach().clone());
  return values;
}

void expect_equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
}

// Every rank throws it, and returns its text.
std::string refused(ProcessGroup& group, Blame blame, const std::function<void()>& call) {
  const Error error = harness::error_of(call);
  EXPECT_EQ(error.blame(), blame) << error.what();
  harness::meet(group);
  return error.text();
}

TEST_P(Checkpoint, GoesOnExactlyLikeTheUninterruptedRun) {
  run(2, [&](ProcessGroup group) {
    struct Run {
      explicit Run(ProcessGroup in, std::uint64_t seed)
          : group(in),
            net(),
            ddp(filled(net, seed), in),
            sgd(net->body->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)),
            adam(net->norm->parameters(), torch::optim::AdamOptions(0.01).amsgrad(true)) {}
      static Normed& filled(Normed& some, std::uint64_t seed) {
        fill(some, seed);
        return some;
      }
      std::vector<checkpoint::Part> parts() {
        return {{"model", ddp.module()}, {"sgd", sgd},   {"adam", adam}, {"step", step},      {"best", best},
                {"done", done},          {"name", name}, {"mean", mean}, {"moments", moments}};
      }
      void go_on(int to) {
        for (; step < to; ++step) {
          sgd.zero_grad();
          adam.zero_grad();
          ddp(part(random({8, 6}, 300 + static_cast<std::uint64_t>(step)), group.rank(), 2)).pow(2).sum().backward();
          sgd.step();
          adam.step();
          best /= 3;
          mean.add_(step);
          moments[1].mul_(2);
        }
      }
      ProcessGroup group;
      Normed net;
      DistributedDataParallel<NormedImpl> ddp;
      torch::optim::SGD sgd;
      torch::optim::Adam adam;
      int step = 0;
      double best = 1;
      bool done = false;
      std::string name;
      torch::Tensor mean = torch::zeros({2}, torch::kFloat);
      std::vector<torch::Tensor> moments = {torch::ones({}), torch::ones({2, 2}, torch::kLong)};
    };
    Run whole(group, 1);
    whole.done = true;
    whole.name = "läuft";
    whole.go_on(3);
    checkpoint::save(file_, group, whole.parts());
    const auto saved = values_of(*whole.net);
    for (const auto& value : saved) group.broadcast(value, 0).wait();  // each rank has buffers of its own batches
    const double best = whole.best;
    whole.go_on(6);

    Run again(group, 99);
    again.go_on(2);  // what was there before does not show
    const void* const memory = again.net->tied.const_data_ptr();
    checkpoint::load(file_, group, again.parts());
    EXPECT_EQ(again.net->tied.const_data_ptr(), memory);
    EXPECT_EQ(again.step, 3);
    EXPECT_EQ(again.best, best);
    EXPECT_TRUE(again.done);
    EXPECT_EQ(again.name, "läuft");
    expect_equal(values_of(*again.net), saved);
    again.go_on(6);
    expect_equal(values_of(*again.net), values_of(*whole.net));
    EXPECT_TRUE(torch::equal(again.mean, whole.mean));
    expect_equal(again.moments, whole.moments);
    EXPECT_EQ(again.best, whole.best);
  });
  EXPECT_EQ(files_in(folder_.path()), std::set<std::string>{"run.pt"});
}

void set_gradients(const std::vector<torch::Tensor>& parameters, int step) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto parameter = parameters[i];
    parameter.mutable_grad() = random(parameter.sizes(), static_cast<std::uint64_t>(100 * step) + i);
  }
}

template <class Optimizer>
void steps(const Mlp& net, Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    set_gradients(net->parameters(), step);
    optimizer.step();
  }
}

TEST_P(Checkpoint, OfAZeroOptimizerIsLoadedByAnyNumberOfRanksAndByThePlainOptimizer) {
  using Zero = ZeroRedundancyOptimizer<torch::optim::Adam>;
  const auto options = torch::optim::AdamOptions(0.01).amsgrad(true);
  run(2, [&](ProcessGroup group) {
    Mlp net;
    fill(net);
    Zero zero(net->parameters(), group, options, {.shard_bytes = 1});
    steps(net, zero, 0, 4);
    checkpoint::save(file_, group, {{"model", net}, {"optimizer", zero}});
  });
  const auto goes_on = [&](const Mlp& net) {
    Mlp undisturbed;
    fill(undisturbed);
    torch::optim::Adam optimizer(undisturbed->parameters(), options);
    steps(undisturbed, optimizer, 0, 7);
    EXPECT_EQ(difference(net->parameters(), undisturbed->parameters()), 0);
  };
  run(3, [&](ProcessGroup group) {
    Mlp net;
    Zero zero(net->parameters(), group, torch::optim::AdamOptions(77), {.parameters_as_bucket_view = true});
    checkpoint::load(file_, group, {{"model", net}, {"optimizer", zero}});
    steps(net, zero, 4, 7);
    goes_on(net);
    // And what a plain one has saved goes into this.
    Mlp plain;
    fill(plain);
    torch::optim::Adam optimizer(plain->parameters(), options);
    steps(plain, optimizer, 0, 4);
    checkpoint::save(file_, group, {{"optimizer", optimizer}, {"model", plain}});
    checkpoint::load(file_, group, {{"model", net}, {"optimizer", zero}});
    steps(net, zero, 4, 7);
    goes_on(net);
  });
  run(1, [&](ProcessGroup group) {
    Mlp net;
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(77));
    checkpoint::load(file_, group, {{"model", net}, {"optimizer", optimizer}});
    steps(net, optimizer, 4, 7);
    goes_on(net);
  });
}

TEST_P(Checkpoint, TravelsByTheOwnTransportsToo) {
  for (const char* backend : {"shm", "tcp"}) {
    run(3,
        [&](ProcessGroup group) {
          Mlp net;
          fill(net);
          ZeroRedundancyOptimizer<torch::optim::Adam> zero(net->parameters(), group, torch::optim::AdamOptions(0.01));
          steps(net, zero, 0, 1);
          if (group.rank() != 0) fill(net, 99);
          const auto large = torch::arange(3 << 20, torch::kInt);  // of several pieces
          checkpoint::save(file_, group, {{"model", net}, {"optimizer", zero}, {"large", large}});
          Mlp other;
          torch::Tensor arrived;
          checkpoint::load(file_, group, {{"model", other}, {"large", arrived}});
          EXPECT_TRUE(torch::equal(arrived, large));
          Mlp rank_0;
          fill(rank_0);
          torch::optim::Adam plain(rank_0->parameters(), torch::optim::AdamOptions(0.01));
          steps(rank_0, plain, 0, 1);
          EXPECT_EQ(difference(other->parameters(), rank_0->parameters()), 0);
        },
        {.backend = backend});
  }
}

TEST_P(Checkpoint, ThatDoesNotFitOnOneRankChangesNothingOnAny) {
  run(2, [&](ProcessGroup group) {
    Mlp saved;
    fill(saved);
    torch::optim::SGD saved_optimizer(saved->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    steps(saved, saved_optimizer, 0, 2);
    int epoch = 7;
    checkpoint::save(file_, group, {{"epoch", epoch}, {"model", saved}, {"optimizer", saved_optimizer}});

    Mlp net(6, group.rank() == 1 ? 4 : 5, 3);
    fill(net, 5);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5).momentum(0.1));
    auto& options = static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
    steps(net, optimizer, 5, 6);
    const auto before = values_of(*net);
    const std::size_t states = optimizer.state().size();
    epoch = 1;
    std::string text = refused(group, Blame::Caller, [&] {
      checkpoint::load(file_, group, {{"optimizer", optimizer}, {"epoch", epoch}, {"model", net}});
    });
    EXPECT_EQ(text, "the checkpoint '" + file_ +
                        "' does not fit on rank 1, and nothing was loaded: part 'optimizer': in the "
                        "file parameter 0 of group 0 is Double [5, 6], here parameter 0 of group 0 is Double [4, 6]");
    text = refused(group, Blame::Caller, [&] { checkpoint::load(file_, group, {{"epoch", epoch}, {"model", net}}); });
    EXPECT_EQ(text, "the checkpoint '" + file_ +
                        "' does not fit on rank 1, and nothing was loaded: part 'model': parameter "
                        "'first.weight' is Double [5, 6] in the file and Double [4, 6] here");
    expect_equal(values_of(*net), before);
    EXPECT_EQ(epoch, 1);
    EXPECT_EQ(optimizer.state().size(), states);
    EXPECT_EQ(options.lr(), 0.5);
    EXPECT_EQ(&options, &optimizer.param_groups()[0].options());
    // The next one of both finds the group in step.
    checkpoint::load(file_, group, {{"epoch", epoch}});
    EXPECT_EQ(epoch, 7);
  });
}

TEST_P(Checkpoint, ThatIsDamagedOrNoneIsRefusedOnAllRanks) {
  run(2, [&](ProcessGroup group) {
    Mlp net;
    fill(net);
    checkpoint::save(file_, group, {{"model", net}});
    const std::string whole = content_of(file_);
    fill(net, 5);
    const auto before = values_of(*net);
    std::mt19937 random(3);
    for (int i = 0; i < 40; ++i) {
      harness::meet(group);
      if (group.rank() == 0) {
        std::string damaged = whole;
        if (i % 2 == 0) {
          damaged.resize(random() % whole.size());
        } else {
          char& one = damaged[random() % whole.size()];
          one = static_cast<char>(one ^ (1 << random() % 8));
        }
        put(file_, damaged);
      }
      const std::string text = refused(group, Blame::Caller, [&] { checkpoint::load(file_, group, {{"model", net}}); });
      EXPECT_THAT(text, AllOf(HasSubstr("the checkpoint '" + file_ + "' is "), Not(HasSubstr("miniz"))));
    }
    // One of libtorch's own, one that is not there, a folder.
    if (group.rank() == 0) torch::save(net, file_);
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_, group, {{"model", net}});
                        }),
                HasSubstr("is none that weft::checkpoint::save has written, or its end is missing"));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_ + "x", group, {{"model", net}});
                        }),
                HasSubstr("the checkpoint '" + file_ + "x' cannot be read: No such file or directory"));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(folder_.path(), group, {{"model", net}});
                        }),
                HasSubstr("is not a regular file"));
    // Whole, and of something else.
    if (group.rank() == 0) write_file(file_, "no archive");
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_, group, {{"model", net}});
                        }),
                Not(HasSubstr("\n")));
    expect_equal(values_of(*net), before);
  });
}

TEST_P(Checkpoint, ThatCannotBeWrittenIsAnErrorOnAllRanksAndLeavesTheOldOne) {
  run(2, [&](ProcessGroup group) {
    int epoch = 1;
    checkpoint::save(file_, group, {{"epoch", epoch}});
    for (const std::string& file : {folder_.path() + "/missing/run.pt", std::string("/proc/run.pt"), folder_.path()}) {
      EXPECT_THAT(refused(group, Blame::Caller,
                          [&] {
                            checkpoint::save(file, group, {{"epoch", 2}});
                          }),
                  HasSubstr("the checkpoint '" + file + "' cannot be written: "));
    }
    checkpoint::check_writable(file_, group);
    checkpoint::check_writable(folder_.path() + "/other.pt", group);
    const torch::Tensor undefined;
    EXPECT_EQ(refused(group, Blame::Caller,
                      [&] {
                        checkpoint::save(file_, group, {{"epoch", 2}, {"loss", undefined}});
                      }),
              "part 'loss' of the checkpoint cannot be saved: a tensor is undefined");
    epoch = 0;
    checkpoint::load(file_, group, {{"epoch", epoch}});
    EXPECT_EQ(epoch, 1);
  });
  EXPECT_EQ(files_in(folder_.path()), std::set<std::string>{"run.pt"});
}

TEST_P(Checkpoint, IsThereForAllRanksOrForNone) {
  run(2, [&](ProcessGroup group) {
    EXPECT_FALSE(checkpoint::exists(file_, group));
    EXPECT_FALSE(checkpoint::exists(folder_.path() + "/missing/run.pt", group));
    harness::meet(group);
    checkpoint::save(file_, group, {});
    EXPECT_TRUE(checkpoint::exists(file_, group));
    // Rank 0's alone is looked for.
    EXPECT_TRUE(checkpoint::exists(group.rank() == 0 ? file_ : "elsewhere", group));
  });
}

TEST_P(Checkpoint, OfDifferentPartsIsRefused) {
  run(3, [&](ProcessGroup group) {
    int a = 1;
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::save(file_, group, {{group.rank() == 2 ? "b" : "a", a}});
                        }),
                HasSubstr("the ranks name different parts for one checkpoint: those of rank 2 are not those of rank 0"));
    EXPECT_EQ(refused(group, Blame::Caller,
                      [&] {
                        checkpoint::save(file_, group, {{"a", a}, {"a", a}});
                      }),
              "two parts of the checkpoint have the name 'a'");
    if (group.rank() == 1) a = 2;
    EXPECT_EQ(refused(group, Blame::Caller,
                      [&] {
                        checkpoint::save(file_, group, {{group.rank() == 1 ? "" : "a", a}});
                      }),
              "a part of the checkpoint has no name");
  });
  EXPECT_TRUE(files_in(folder_.path()).empty());
}

// Whichever rank it is, and whenever: the others hear of it, and a whole file is there.
TEST(CheckpointKilled, WithARankTheOthersThrowAndTheFileIsWhole) {
  for (int seed = 0; seed < 6; ++seed) {
    const harness::Folder folder;
    const std::string file = folder.path() + "/run.pt";
    constexpr int kRanks = 3;
    harness::Processes processes(kRanks, [&](int) {
      ProcessGroup group = init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
      Mlp net;
      std::int64_t round = 0;
      checkpoint::save(file, group, {{"model", net}, {"round", round}});
      harness::Processes::say("ready");
      const Error error = harness::error_of([&] {
        for (;; ++round) {
          checkpoint::save(file, group, {{"model", net}, {"round", round}});
          checkpoint::load(file, group, {{"model", net}, {"round", round}});
        }
      });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    });
    harness::kill_anywhen(processes, kRanks, seed % kRanks, seed, std::chrono::milliseconds(30));
    EXPECT_FALSE(read_file(file).empty());
  }
}

// --- the parts, on one rank -------------------------------------------------------------------------------------------

class CheckpointParts : public ::testing::Test {
 protected:
  const harness::Folder folder_;
  const std::string file_ = folder_.path() + "/run.pt";
  static void on_one_rank(const harness::Body& body) { harness::run_ranks(harness::As::Threads, 1, body); }
};

TEST_F(CheckpointParts, ThatTheFileHasNotAreNamedBesideThoseThatItHas) {
  on_one_rank([&](ProcessGroup group) {
    Mlp net;
    int epoch = 1;
    checkpoint::save(file_, group, {{"model", net}, {"the epoch", epoch}});
    const auto text_of = [&](const std::vector<checkpoint::Part>& parts) {
      return refused(group, Blame::Caller, [&] { checkpoint::load(file_, group, parts); });
    };
    EXPECT_THAT(text_of({{"modell", net}}),
                HasSubstr("part 'modell': the file has none of that name, but 'model', 'the epoch'"));
    EXPECT_THAT(text_of({{"model", net->first}}), HasSubstr("part 'model': the file has no parameter 'weight'"));
    torch::nn::Sequential less(torch::nn::Linear(1, 1));
    auto more = std::make_shared<MlpImpl>();
    more->register_buffer("mask", torch::ones({1}));
    EXPECT_THAT(text_of({{"model", more}}), HasSubstr("part 'model': the file has no buffer 'mask'"));
    checkpoint::save(file_, group, {{"model", *more}});
    EXPECT_THAT(text_of({{"model", net}}),
                HasSubstr("part 'model': the file has a parameter or buffer 'mask', which the module here has not"));
    checkpoint::save(file_, group, {});
    EXPECT_THAT(text_of({{"model", net}}), HasSubstr("but no part at all"));
  });
}

// libtorch's own archives cannot be read again with some of these.
std::vector<std::string> odd_names() {
  std::vector<std::string> names = {
      "a b", "0", "a/b", "ä", "it's \"quoted\"", "\\n", "%", "in%", "%25", "__parameters__", "__annotations__"};
  for (int letter = 0; letter < 128; ++letter) {
    if (letter != '.' && letter != '0' && letter != '%') names.push_back({static_cast<char>(letter)});
  }
  std::istringstream words(
      "False None True and as assert async await break class continue def del elif else except finally for from global if "
      "import in is lambda nonlocal not or pass raise return try while with yield Ellipsis NoneType self forward training "
      "torch");
  for (std::string word; words >> word;) names.push_back(word);
  return names;
}

TEST_F(CheckpointParts, NamedByAnyTextCome) {
  on_one_rank([&](ProcessGroup group) {
    const std::vector<std::string> names = odd_names();
    std::vector<int> numbers(names.size());
    torch::nn::Module net;
    std::vector<checkpoint::Part> parts;
    for (std::size_t i = 0; i < names.size(); ++i) {
      numbers[i] = static_cast<int>(i);
      auto child = std::make_shared<torch::nn::Module>();
      child->register_buffer(names[i], torch::full({2}, numbers[i]));
      net.register_module(names[i], child);
      parts.emplace_back(names[i], numbers[i]);
    }
    parts.emplace_back("the.net", net);
    checkpoint::save(file_, group, parts);
    const auto values = values_of(net);
    for (auto& buffer : net.buffers()) buffer.zero_();
    for (int& number : numbers) number = -1;
    checkpoint::load(file_, group, parts);
    expect_equal(values_of(net), values);
    EXPECT_EQ(values.size(), names.size());
    for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(numbers[i], static_cast<int>(i)) << names[i];
  });
}

TEST_F(CheckpointParts, AreOfOneTypeInTheFileAndHere) {
  on_one_rank([&](ProcessGroup group) {
    Mlp net;
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
    torch::Tensor tensor = torch::ones({2});
    std::vector<torch::Tensor> list = {torch::ones({2})};
    const std::size_t count = 300;
    const float rate = 0.1f;
    checkpoint::save(file_, group,
                     {{"number", count},
                      {"rate", rate},
                      {"text", "text"},
                      {"flag", true},
                      {"negative", -1},
                      {"tensor", tensor},
                      {"list", list},
                      {"model", net},
                      {"sgd", sgd}});
    const auto expect_refused = [&](const checkpoint::Part& part, const std::string& text) {
      EXPECT_THAT(refused(group, Blame::Caller, [&] { checkpoint::load(file_, group, {part}); }), HasSubstr(text));
    };
    std::uint8_t small = 1;
    unsigned int whole = 1;
    double real = 1;
    bool flag = false;
    std::string text;
    expect_refused({"number", small}, "is the integer 300 in the file and of a type that cannot hold it here");
    expect_refused({"negative", whole}, "is the integer -1 in the file and of a type that cannot hold it here");
    expect_refused({"number", real}, "is the integer 300 in the file and of another type here");
    expect_refused({"flag", whole}, "is a bool in the file and of another type here");
    expect_refused({"rate", text}, "is a floating-point number in the file and of another type here");
    expect_refused({"model", real}, "is a module, an optimizer or a list of tensors in the file and a variable here");
    expect_refused({"text", tensor}, "is a string in the file and a tensor here");
    expect_refused({"tensor", net}, "is a tensor in the file and a module, an optimizer or a list of tensors here");
    expect_refused({"model", sgd}, "it is no optimizer in the file");
    expect_refused({"sgd", net}, "the file has no parameter 'first.weight'");
    expect_refused({"model", list}, "is 6 tensors in the file and 1 here");
    torch::Tensor other = torch::ones({2}, torch::kLong);
    expect_refused({"tensor", other}, "is Float [2] in the file and Long [2] here");
    torch::Tensor expanded = torch::ones({1}).expand({2});
    expect_refused({"tensor", expanded}, "is expanded here");
    expect_refused({"number", 3}, "it is a constant here, or a temporary");
    const bool constant = false;
    expect_refused({"flag", constant}, "it is a constant here, or a temporary");
    checkpoint::load(file_, group, {{"number", whole}, {"rate", real}, {"text", text}, {"flag", flag}});
    EXPECT_EQ(whole, 300u);
    EXPECT_EQ(static_cast<float>(real), rate);
    EXPECT_EQ(text, "text");
    EXPECT_TRUE(flag);
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::save(file_, group, {{"huge", std::uint64_t(1) << 63}});
                        }),
                HasSubstr("part 'huge' of the checkpoint cannot be saved: it is more than the largest integer"));
  });
}

TEST_F(CheckpointParts, ThatAreEmptyTakeWhatTheFileHas) {
  on_one_rank([&](ProcessGroup group) {
    std::vector<torch::Tensor> list;
    for (int i = 0; i < 12; ++i) list.push_back(torch::full({i % 3}, i));
    // A small part of large memory, of which the file has no more; not contiguous.
    const torch::Tensor view = torch::arange(1'000'000).view({1000, 1000}).narrow(0, 3, 2).narrow(1, 4, 3);
    checkpoint::save(file_, group, {{"list", list}, {"view", view}, {"none", std::vector<torch::Tensor>()}});
    EXPECT_LT(fs::file_size(file_), 100'000u);
    std::vector<torch::Tensor> loaded;
    std::vector<torch::Tensor> none;
    torch::Tensor tensor;
    checkpoint::load(file_, group, {{"list", loaded}, {"view", tensor}, {"none", none}});
    expect_equal(loaded, list);
    EXPECT_TRUE(torch::equal(tensor, view));
    EXPECT_TRUE(none.empty());
  });
}

TEST_F(CheckpointParts, OfAnOptimizerAreItsWholeState) {
  on_one_rank([&](ProcessGroup group) {
    Mlp net;
    fill(net);
    torch::optim::SGD fresh(net->parameters(), torch::optim::SGDOptions(0.25).momentum(0.9));
    checkpoint::save(file_, group, {{"optimizer", fresh}});
    torch::optim::SGD used(net->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
    auto& options = static_cast<torch::optim::SGDOptions&>(used.param_groups()[0].options());
    steps(net, used, 0, 1);
    ASSERT_EQ(used.state().size(), 6u);
    checkpoint::load(file_, group, {{"optimizer", used}});
    EXPECT_EQ(used.state().size(), 0u);
    EXPECT_EQ(options.lr(), 0.25);  // the same object

    // Others' files change nothing.
    steps(net, used, 0, 1);
    torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.125));
    steps(net, adam, 0, 1);
    checkpoint::save(file_, group, {{"optimizer", adam}});
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_, group, {{"optimizer", used}});
                        }),
                HasSubstr("the options or the state in the file are those of another class of optimizer"));
    EXPECT_EQ(used.state().size(), 6u);
    EXPECT_EQ(options.lr(), 0.25);
    torch::optim::Adam fewer(net->first->parameters(), torch::optim::AdamOptions(1));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_, group, {{"optimizer", fewer}});
                        }),
                HasSubstr("the file has the state of 6 parameters, the optimizer here 2"));
    // One that has state from the beginning.
    torch::optim::Adagrad adagrad(net->parameters(), torch::optim::AdagradOptions(0.1));
    steps(net, adagrad, 0, 2);
    checkpoint::save(file_, group, {{"optimizer", adagrad}, {"model", net}});
    Mlp other;
    const std::unique_ptr<torch::optim::Optimizer> again =
        std::make_unique<torch::optim::Adagrad>(other->parameters(), torch::optim::AdagradOptions(1));
    checkpoint::load(file_, group, {{"optimizer", again}, {"model", *other}});
    steps(net, adagrad, 2, 4);
    steps(other, *again, 2, 4);
    EXPECT_EQ(difference(net->parameters(), other->parameters()), 0);
  });
}

template <class Optimizer, class Options>
void expect_to_go_on(ProcessGroup& group, const std::string& file, const Options& options) {
  const auto train = [](Mlp net, Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      const auto loss = [&] {
        optimizer.zero_grad();
        auto value = net->forward(random({4, 6}, static_cast<std::uint64_t>(step))).pow(2).sum();
        value.backward();
        return value;
      };
      loss();
      optimizer.step(loss);
    }
  };
  Mlp net;
  fill(net);
  Optimizer optimizer(net->parameters(), options);
  train(net, optimizer, 0, 3);
  checkpoint::save(file, group, {{"model", net}, {"optimizer", optimizer}});
  Mlp other;
  Optimizer again(other->parameters(), options);
  checkpoint::load(file, group, {{"model", other}, {"optimizer", again}});
  train(net, optimizer, 3, 6);
  train(other, again, 3, 6);
  EXPECT_EQ(difference(net->parameters(), other->parameters()), 0) << typeid(Optimizer).name();
}

TEST_F(CheckpointParts, MayBeAnyOptimizer) {
  on_one_rank([&](ProcessGroup group) {
    using namespace torch::optim;
    expect_to_go_on<SGD>(group, file_, SGDOptions(0.01).momentum(0.9).nesterov(true));
    expect_to_go_on<Adam>(group, file_, AdamOptions(0.01).amsgrad(true));
    expect_to_go_on<AdamW>(group, file_, AdamWOptions(0.01));
    expect_to_go_on<Adagrad>(group, file_, AdagradOptions(0.05));
    expect_to_go_on<RMSprop>(group, file_, RMSpropOptions(0.01).momentum(0.9).centered(true));
    expect_to_go_on<LBFGS>(group, file_, LBFGSOptions(0.1).max_iter(3));
    expect_to_go_on<FusedSGD>(group, file_, SGDOptions(0.01).momentum(0.9));
    expect_to_go_on<FusedAdamW>(group, file_, AdamWOptions(0.01));
  });
}

TEST_F(CheckpointParts, MayBeTensorsOfAnyKind) {
  on_one_rank([&](ProcessGroup group) {
    const auto base = torch::arange(24, torch::kFloat).view({2, 3, 2, 2});
    std::vector<torch::Tensor> tensors = {base.to(torch::MemoryFormat::ChannelsLast),
                                          base.transpose(0, 1),
                                          torch::ones({}),
                                          torch::empty({0, 3}),
                                          torch::ones({1}).expand({3, 4}),
                                          base[1]};
    for (const auto type : {torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong, torch::kBool,
                            torch::kHalf, torch::kBFloat16, torch::kDouble, torch::kComplexFloat, torch::kComplexDouble}) {
      tensors.push_back(base.to(type));
    }
    tensors.push_back(torch::complex(base, base + 1).conj());
    tensors.push_back(torch::imag(tensors.back()));  // a lazy negation
    tensors.push_back(torch::ones({3}).to_sparse());
    checkpoint::save(file_, group, {{"tensors", tensors}});
    std::vector<torch::Tensor> loaded;
    checkpoint::load(file_, group, {{"tensors", loaded}});
    const auto expect_same = [&] {
      ASSERT_EQ(loaded.size(), tensors.size());
      for (std::size_t i = 0; i < loaded.size(); ++i) {
        EXPECT_EQ(loaded[i].scalar_type(), tensors[i].scalar_type()) << i;
        EXPECT_TRUE(torch::equal(loaded[i].to_dense(), tensors[i].to_dense())) << i;
      }
    };
    expect_same();
    for (auto& tensor : loaded) tensor = torch::zeros(tensor.sizes(), tensor.options());
    checkpoint::load(file_, group, {{"tensors", loaded}});
    expect_same();
    {
      const c10::InferenceMode inference;
      loaded[2] = torch::zeros({});
    }
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_, group, {{"tensors", loaded}});
                        }),
                HasSubstr("tensor 2 was made in inference mode"));
  });
}

TEST_F(CheckpointParts, AreReadByLibtorchAlone) {
  on_one_rank([&](ProcessGroup group) {
    Mlp net;
    fill(net);
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
    steps(net, optimizer, 0, 3);
    checkpoint::save(file_, group, {{"model", net}, {"optimizer", optimizer}, {"epoch", 3}});
    torch::serialize::InputArchive archive;
    archive.load_from(file_);
    Mlp other;
    torch::optim::Adam other_optimizer(other->parameters(), torch::optim::AdamOptions(1));
    torch::serialize::InputArchive model;
    torch::serialize::InputArchive state;
    c10::IValue epoch;
    archive.read("model", model);
    archive.read("optimizer", state);
    archive.read("epoch", epoch);
    other->load(model);
    other_optimizer.load(state);
    EXPECT_EQ(epoch.toInt(), 3);
    EXPECT_TRUE(other->first->weight.requires_grad());
    steps(net, optimizer, 3, 5);
    steps(other, other_optimizer, 3, 5);
    EXPECT_EQ(difference(net->parameters(), other->parameters()), 0);
  });
}

// Meta tensors stand for those of another device.
TEST_F(CheckpointParts, GoWhereTheParametersAre) {
  on_one_rank([&](ProcessGroup group) {
    const auto made = [](torch::Device device) {
      auto net = std::make_shared<torch::nn::Module>();
      net->register_parameter("here", torch::ones({2, 3}));
      net->register_parameter("there", torch::ones({4}, device));
      return net;
    };
    const auto net = made(torch::kCPU);
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.1));
    for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer.step();
    checkpoint::save(file_, group, {{"model", net}, {"optimizer", optimizer}});
    const auto other = made(torch::kMeta);
    torch::optim::Adam loaded(other->parameters(), torch::optim::AdamOptions(0.1));
    checkpoint::load(file_, group, {{"model", other}, {"optimizer", loaded}});
    for (const auto& parameter : other->parameters()) {
      ASSERT_EQ(loaded.state().count(parameter.unsafeGetTensorImpl()), 1u);
      const auto& state =
          static_cast<const torch::optim::AdamParamState&>(*loaded.state().at(parameter.unsafeGetTensorImpl()));
      EXPECT_EQ(state.step(), 1);
      EXPECT_EQ(state.exp_avg().device(), parameter.device());
      EXPECT_EQ(state.exp_avg_sq().sizes(), parameter.sizes());
    }
    EXPECT_TRUE(other->parameters()[1].is_meta());
    expect_equal({other->parameters()[0]}, {net->parameters()[0]});
  });
}

TEST_F(CheckpointParts, OfAnEmptyGroupAreRefused) {
  EXPECT_EQ(harness::error_of([&] { checkpoint::save(file_, ProcessGroup(), {}); }).blame(), Blame::Caller);
}

}  // namespace
}  // namespace weft::testing
