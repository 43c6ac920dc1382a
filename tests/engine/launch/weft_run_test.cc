// SPDX-License-Identifier: Apache-2.0
#include <future>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/engine/launch/command.h>
#include <weft/version.h>

namespace weft::launch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// Runs weft-run with these options and a shell script as the program.
Outcome shell(const std::string& options, const std::string& script) {
  return run(path_of("weft-run") + " " + options + " sh -c '" + script + "'");
}

TEST(WeftRun, SetsTorchrunsVariables) {
  const auto outcome = shell(
      "--nproc-per-node 2 --no-prefix",
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE "
      "$ROLE_RANK "
      "$ROLE_WORLD_SIZE $ROLE_NAME $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_RUN_ID "
      "$OMP_NUM_THREADS; test $MASTER_PORT -gt 0");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre("0 0 2 2 0 1 0 2 default 127.0.0.1 0 none 1",
                                           "1 1 2 2 0 1 1 2 default 127.0.0.1 0 none 1"));
}

TEST(WeftRun, SetsUnsetCudaVariables) {
  const auto outcome =
      run("unset CUDA_DEVICE_MAX_CONNECTIONS; CUDA_MODULE_LOADING=LAZY " + path_of("weft-run") +
          " --no-prefix sh -c 'echo $CUDA_DEVICE_MAX_CONNECTIONS $CUDA_MODULE_LOADING'");
  EXPECT_THAT(outcome.lines(), ElementsAre("32 LAZY"));
}

TEST(WeftRun, CountsRanksOverSeveralMachines) {
  const auto outcome = shell(
      "--nnodes 3 --node-rank 2 --nproc-per-node 2 --rdzv-backend static --master-addr 10.0.0.1 "
      "--master-port 29500 "
      "--no-prefix",
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR:$MASTER_PORT");
  EXPECT_THAT(outcome.lines(), ElementsAre("4 0 6 2 10.0.0.1:29500", "5 1 6 2 10.0.0.1:29500"));
}

TEST(WeftRun, PrefixesEveryLineWithItsRank) {
  const auto outcome =
      shell("--nproc-per-node 2", "echo one; echo two $RANK; printf unended; echo warning >&2");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.lines(), ElementsAre("[rank 0] one", "[rank 0] two 0", "[rank 0] unended",
                                           "[rank 1] one", "[rank 1] two 1", "[rank 1] unended"));
  EXPECT_THAT(outcome.err, HasSubstr("[rank 0] warning\n"));
  EXPECT_THAT(outcome.err, HasSubstr("[rank 1] warning\n"));
}

TEST(WeftRun, PassesTheProgramsArguments) {
  const auto outcome =
      run(path_of("weft-run") + " --no-prefix echo --nproc-per-node 7 --help -- end");
  EXPECT_THAT(outcome.lines(), ElementsAre("--nproc-per-node 7 --help -- end"));
}

TEST(WeftRun, FailureReportOmitsStackFrames) {
  const auto outcome = shell("--nproc-per-node 1",
                             "echo element 0 does not require grad >&2; for i in $(seq 60); do "
                             "echo frame \\#$i: at::f >&2; "
                             "done; exit 3");
  EXPECT_EQ(outcome.code, 3);
  const auto report = outcome.err.substr(outcome.err.find("weft-run: rank 0 failed first"));
  EXPECT_THAT(report, HasSubstr("  element 0 does not require grad\n"));
  EXPECT_THAT(report, Not(HasSubstr("frame #")));
  EXPECT_THAT(outcome.err, HasSubstr("frame #60"));
}

TEST(WeftRun, FailureReportNamesFinishedRanks) {
  const auto outcome = shell("--nproc-per-node 3", "test $RANK = 1 || exit 0; sleep 0.5; exit 3");
  EXPECT_EQ(outcome.code, 3);
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: rank 1 failed first: exit code 3"));
  EXPECT_THAT(outcome.err,
              HasSubstr("weft-run: before that, ranks 0, 2 had ended with exit code 0\n"));
}

TEST(WeftRun, FailureEndsOthersAndIsShownFirst) {
  const auto outcome = shell("--nproc-per-node 3 --grace 1",
                             "test $RANK = 1 || exec sleep 1000; echo the reason >&2; exit 3");
  EXPECT_EQ(outcome.code, 3);
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: rank 1 failed first: exit code 3"));
  EXPECT_THAT(outcome.err, HasSubstr("\n  the reason\n"));
  EXPECT_THAT(outcome.err, HasSubstr("rank 0 was ended"));
  EXPECT_THAT(outcome.err, HasSubstr("rank 2 was ended"));
}

TEST(WeftRun, KillsRanksThatIgnoreSigterm) {
  const auto outcome = shell("--nproc-per-node 2 --grace 1",
                             "test $RANK = 1 && exit 4; trap : TERM; while :; do sleep 1000; done");
  EXPECT_EQ(outcome.code, 4);
}

// The rank writes more than the 64 KiB that a pipe holds.
TEST(WeftRun, EndingRanksMayStillWriteMuch) {
  const auto outcome =
      run("d=$(mktemp -d); export d; " + path_of("weft-run") +
          " --nproc-per-node 2 --grace 3 sh -c '"
          "test $RANK = 1 && { until test -e $d/ready; do sleep 0.01; done; exit 5; }; "
          "trap \"seq 100000 159999; echo > $d/saved; exit 0\" TERM; echo > $d/ready; "
          "while :; do sleep 0.01; done'; code=$?; test -e $d/saved && echo saved; rm -r $d; exit "
          "$code");
  EXPECT_EQ(outcome.code, 5) << outcome.err;
  const auto lines = outcome.lines();
  ASSERT_EQ(lines.size(), 60'001U);
  EXPECT_EQ(lines.front(), "[rank 0] 100000");
  EXPECT_EQ(lines[59'999], "[rank 0] 159999");
  EXPECT_EQ(lines.back(), "saved");
}

TEST(WeftRun, SignalIsReportedByName) {
  const auto outcome =
      shell("--nproc-per-node 2 --grace 1", "test $RANK = 1 || exec sleep 1000; kill -KILL $$");
  EXPECT_EQ(outcome.code, 128 + 9);
  EXPECT_THAT(outcome.err, HasSubstr("rank 1 failed first: signal 9 (Killed)"));
  EXPECT_THAT(outcome.err, HasSubstr("it wrote nothing to stderr"));
}

TEST(WeftRun, RankThatLostAnotherIsNotTheCause) {
  // Rank 0 ends first, because it has lost rank 1; rank 1 ends after it.
  const std::string script =
      "fifo=$0; if [ $RANK = 0 ]; then echo \"rank 1 is lost [PeerLost at x.cc:1]\" >&2; echo > "
      "$fifo; exit 1; fi; "
      "read line < $fifo; echo the cause >&2; exit 6";
  const auto outcome =
      run("d=$(mktemp -d); mkfifo $d/fifo; " + path_of("weft-run") + " --nproc-per-node 2 sh -c '" +
          script + "' $d/fifo; code=$?; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 6) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: rank 1 failed first: exit code 6"));
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: then rank 0: exit code 1"));
}

TEST(WeftRun, OwnFailureIsTheCauseDespiteItsLog) {
  // Rank 1, which only lost rank 0, ends first.
  const std::string script =
      "fifo=$0; if [ $RANK = 1 ]; then echo \"x: rank 0 has left [Cancelled at x.cc:1] [Remote at "
      "y.cc:2]\" >&2; "
      "echo > $fifo; exit 1; fi; read line < $fifo; "
      "echo \"weft 12:34:56.789 W rank 0 | f threw: it has left [Cancelled at x.cc:1]\" >&2; echo "
      "the cause >&2; exit 6";
  const auto outcome =
      run("d=$(mktemp -d); mkfifo $d/fifo; " + path_of("weft-run") + " --nproc-per-node 2 sh -c '" +
          script + "' $d/fifo; code=$?; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 6) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: rank 0 failed first: exit code 6"));
}

// Processes below a rank hold a lock as long as they live; `flock` gets it when none is left.
Outcome wrapped(const std::string& weft_run) {
  return run("d=$(mktemp -d); mkfifo $d/ready; export d; " + weft_run +
             "; code=$?; flock -w 30 $d/lock true || code=99; "
             "rm -r $d; exit $code");
}
constexpr const char* kProgram = "flock $d/lock sh -c \"echo > $d/ready; exec sleep 1000\"";

TEST(WeftRun, FailureEndsTheScriptsChildren) {
  const auto outcome =
      wrapped(path_of("weft-run") + " --nproc-per-node 2 --grace 1 sh -c 'test $RANK = 1 || { " +
              kProgram + "; exit; }; read line < $d/ready; exit 3'");
  EXPECT_EQ(outcome.code, 3) << outcome.err;
}

TEST(WeftRun, SignalEndsTheScriptsChildren) {
  const auto outcome = wrapped("{ " + path_of("weft-run") + " sh -c '" + kProgram +
                               "; exit' & read line < $d/ready; kill -TERM $!; wait $!; }");
  EXPECT_EQ(outcome.code, 128 + 15) << outcome.err;
  EXPECT_THAT(outcome.err,
              HasSubstr("weft-run: ended by signal 15 (Terminated); it ends its ranks"));
}

// Programs that do not end at SIGTERM, below wrappers that people put between a launcher and a
// program.
const std::map<std::string, std::string>& wrappers() {
  static const std::map<std::string, std::string> all = [] {
    const std::string program =
        "flock $d/lock sh -c \"trap : TERM; echo > $d/ready; while :; do sleep 0.01; done\"";
    return std::map<std::string, std::string>{
        {"none", "exec " + program},
        {"a shell", program + "; echo"},
        {"a shell that waits for a job", program + " & wait; echo"},
        {"an orphan", "(" + program + " &); exec sleep 1000"},
        {"an orphan of an orphan", "((" + program + " &) &); exec sleep 1000"},
        {"a session", "setsid -w " + program + "; echo"},
        {"several", "env nice timeout 1000 sh -c \"env " +
                        std::string("flock $d/lock sh -c \\\"trap : TERM; ") +
                        "echo > $d/ready; while :; do sleep 0.01; done\\\"; echo\"; echo"},
    };
  }();
  return all;
}

// Runs one weft-run for each wrapper, all at the same time. `killed` is a command that prints the
// number of the process to kill.
void expect_ended_with(const std::string& killed, const std::string& said) {
  std::map<std::string, std::future<Outcome>> outcomes;
  for (const auto& [what, script] : wrappers()) {
    const std::string command =
        "{ " + path_of("weft-run") + " --grace 1 sh -c 'echo $PPID > $d/parent; " + script +
        "' & read line < $d/ready; kill -KILL $(" + killed + "); wait $!; }";
    outcomes[what] = std::async(std::launch::async, [command] { return wrapped(command); });
  }
  for (auto& [what, coming] : outcomes) {
    const Outcome outcome = coming.get();
    EXPECT_EQ(outcome.code, 128 + 9) << what << ": " << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(said)) << what;
  }
}

TEST(WeftRun, KilledWeftRunEndsItsProcessTree) {
  expect_ended_with("echo $!", "weft-run: ended by signal 15 (Terminated); it ends its ranks");
}

TEST(WeftRun, KilledWatcherEndsTheProcessTree) {
  expect_ended_with("cat $d/parent",
                    "weft-run: the process that watched the ranks was killed: signal 9 (Killed)");
}

// People kill weft-run by its name, so only the process that they have started may have that name.
TEST(WeftRun, OnlyTheStartedProcessHasItsName) {
  const auto outcome =
      run("d=$(mktemp -d); mkfifo $d/ready $d/go; export d; " + path_of("weft-run") +
          " --no-prefix sh -c 'cat /proc/$PPID/comm /proc/$PPID/cmdline | tr -d \\\\0; echo; "
          "echo > $d/ready; read line < $d/go' & read line < $d/ready; cat /proc/$!/comm; "
          "echo > $d/go; wait $!; code=$?; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre("weft ranks", "weft ranks", "weft-run"));
}

TEST(WeftRun, LeavesItsRanksDaemonsAlone) {
  const auto outcome =
      run("d=$(mktemp -d); mkfifo $d/ready; export d; " + path_of("weft-run") +
          " sh -c 'setsid -f sh -c \"echo \\$\\$ > $d/pid; echo > $d/ready; exec sleep 1000\"; "
          "read line < $d/ready'; code=$?; kill $(cat $d/pid) || code=99; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

TEST(WeftRun, WaitsWhereSigchldIsIgnored) {
  const auto outcome = run("trap '' CHLD; exec timeout 60 " + path_of("weft-run") +
                           " --nproc-per-node 2 sh -c 'exit $RANK'");
  EXPECT_EQ(outcome.code, 1) << outcome.err;
}

TEST(WeftRun, EndsProcessesLeftByItsRanks) {
  const auto outcome =
      wrapped(path_of("weft-run") + " sh -c '" + kProgram + " & read line < $d/ready; exit 0'");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("processes that they left behind"));
}

TEST(WeftRun, RanksHaveTheTerminalAndCtrlC) {
  const auto outcome =
      run(path_of("python") + " " + path_of("sources") + "/terminal.py " + path_of("weft-run"));
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
}

TEST(WeftRun, UnwritableOutputIsAnError) {
  const auto full = run(path_of("weft-run") + " sh -c 'echo hi' > /dev/full");
  EXPECT_EQ(full.code, 1);
  EXPECT_THAT(full.err, HasSubstr("cannot write to stdout: No space left on device"));
}

// Otherwise the ranks' output would go to whichever file gets the number of the closed stream.
TEST(WeftRun, RunsWithClosedStreams) {
  for (const std::string closed : {"<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"}) {
    const auto outcome =
        run(path_of("weft-run") + " --nproc-per-node 2 sh -c 'echo out; echo err >&2' " + closed);
    EXPECT_EQ(outcome.code, 0) << closed << ": " << outcome.err;
    const bool has_stdout = closed.find(" >") == std::string::npos && closed[0] != '>';
    EXPECT_EQ(outcome.lines().size(), has_stdout ? 2u : 0u) << closed;
  }
}

TEST(WeftRun, BrokenOutputPipeEndsTheJob) {
  const auto outcome =
      run("{ " + path_of("weft-run") +
          " --nproc-per-node 2 sh -c 'while :; do echo y; done'; echo $? >&2; } | head -n 1");
  EXPECT_THAT(outcome.err, HasSubstr("cannot write to stdout: Broken pipe"));
  EXPECT_THAT(outcome.err, HasSubstr("\n141\n"));
}

TEST(WeftRun, EndlessOutputDoesNotHideAFailure) {
  const auto outcome = shell("--nproc-per-node 2 --grace 1",
                             "test $RANK = 1 && exit 3; while :; do echo y; done; exit 0");
  EXPECT_EQ(outcome.code, 3) << outcome.err;
}

TEST(WeftRun, PassesSigusr1ToItsHandlers) {
  // The shell around the rank's program has no handler, and continues.
  const auto outcome = run(
      "d=$(mktemp -d); mkfifo $d/ready; export d; " + path_of("weft-run") +
      " --no-prefix sh -c 'sh -c \"trap \\\"echo asked; exit 0\\\" USR1; echo > $d/ready; "
      "while :; do sleep 0.01; done\"; echo after' & read line < $d/ready; kill -USR1 $!; wait $!; "
      "code=$?; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "asked\nafter\n");
}

TEST(WeftRun, AsksEndingRanksForTheirDumps) {
  // Rank 1 fails once rank 0 handles the signal.
  const std::string script =
      "trap \"echo asked\" USR1; trap \"exit 0\" TERM; test $RANK = 1 && { read line < $d/ready; "
      "exit 3; }; "
      "echo > $d/ready; while :; do sleep 0.01; done";
  const std::string before = "d=$(mktemp -d); mkfifo $d/ready; export d; ";
  const std::string after = "; code=$?; rm -r $d; exit $code";
  const auto outcome =
      run(before + "WEFT_DUMP_DIR=/tmp " + path_of("weft-run") +
          " --nproc-per-node 2 --grace 1 --no-prefix sh -c '" + script + "'" + after);
  EXPECT_EQ(outcome.code, 3);
  EXPECT_THAT(outcome.lines(), ElementsAre("asked"));
  const auto without =
      run(before + "env -u WEFT_DUMP_DIR " + path_of("weft-run") +
          " --nproc-per-node 2 --grace 1 --no-prefix sh -c '" + script + "'" + after);
  EXPECT_TRUE(without.lines().empty());
}

TEST(WeftRun, UnmergedTimelineKeepsTheExitCode) {
  const std::string header = R"({"weft":"timeline part 1","job":"j","rank":0,"ranks":1,"host":"h",)"
                             R"("machine":"m","pid":1,"offset":0,"error":0})";
  for (const int code : {0, 3}) {
    const auto outcome =
        run("d=$(mktemp -d); mkdir $d/run.json $d/run.json.parts; echo '" + header +
            "' > $d/run.json.parts/j.0.1; WEFT_TIMELINE=$d/run.json " + path_of("weft-run") +
            " sh -c 'exit " + std::to_string(code) + "'; code=$?; ls $d; rm -r $d; exit $code");
    EXPECT_EQ(outcome.code, code);
    EXPECT_THAT(outcome.err, HasSubstr("weft-run: the timeline was not written: "));
    EXPECT_THAT(outcome.lines(), ElementsAre("run.json", "run.json.parts"));
  }
}

TEST(WeftRun, ShowsItsRanksStatusAtTheEnd) {
  const auto outcome =
      run(path_of("weft-run") +
          " --nproc-per-node 2 --status --no-prefix sh -c 'test -w $WEFT_STATUS_FILE || exit 3'");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.err, HasSubstr(" | rank 0: has not joined | rank 1: has not joined"));
}

TEST(WeftRun, SignalToItEndsItsRanks) {
  // The rank ends its launcher, which sends the same signal to the ranks.
  const auto outcome =
      shell("--nproc-per-node 1 --no-prefix",
            "trap \"echo ended; exit 0\" TERM; kill -TERM $PPID; while :; do sleep 0.01; done");
  EXPECT_EQ(outcome.code, 128 + 15);
  EXPECT_THAT(outcome.lines(), ElementsAre("ended"));
}

TEST(WeftRun, FirstSignalDecidesTheExitCode) {
  // The rank sends the second signal when it has received the first.
  const auto outcome = shell(
      "--nproc-per-node 1 --no-prefix",
      "trap \"kill -INT \\$PPID; exit 0\" TERM; kill -TERM $PPID; while :; do sleep 0.01; done");
  EXPECT_EQ(outcome.code, 128 + 15) << outcome.err;
}

// Each of the two signals comes first once; Ctrl-C then arrives while weft-run waits for its ranks.
TEST(WeftRun, LaterCtrlCKillsSlowRanks) {
  for (const std::string first : {"INT", "TERM"}) {
    const auto outcome = shell("--nproc-per-node 1 --no-prefix --grace 1000",
                               "trap \"\" TERM; trap \"kill -INT \\$PPID\" INT; test " + first +
                                   " = TERM && trap \"kill -INT \\$PPID\" TERM; kill -" + first +
                                   " $PPID; while :; do sleep 0.01; done");
    EXPECT_EQ(outcome.code, 128 + (first == "INT" ? 2 : 15)) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("Ctrl-C again; it kills its ranks"));
  }
}

TEST(WeftRun, HelpListsTheOptions) {
  const auto outcome = run(path_of("weft-run") + " --help");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.out, HasSubstr("Usage: weft-run [OPTIONS] PROGRAM [ARGUMENTS]\n"));
  for (const char* option :
       {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--grace",
        "--no-prefix", "--status", "--max-restarts", "--rdzv-endpoint", "--log-dir",
        "OMP_NUM_THREADS=1"}) {
    EXPECT_THAT(outcome.out, HasSubstr(option));
  }
}

TEST(WeftRun, VersionNamesItsProgram) {
  const std::string version = " " WEFT_VERSION;
  const std::map<std::string, std::string> lines{
      {"weft-run", "weft-run" + version + "\n"},
      {"weft-agent", "weft-agent" + version + " (libtorch " WEFT_TEST_LIBTORCH ")\n"}};
  for (const auto& [program, line] : lines) {
    const auto outcome = run(path_of(program) + " --version");
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.out, line);
  }
}

TEST(WeftRun, RefusesWhatItCannotStart) {
  const auto refused = [](const std::string& arguments, int code = 2) {
    const auto outcome = run(path_of("weft-run") + " " + arguments);
    EXPECT_EQ(outcome.code, code) << arguments;
    EXPECT_THAT(outcome.out, Not(HasSubstr("started"))) << arguments;
    return outcome.err;
  };
  EXPECT_THAT(refused(""), HasSubstr("no program is given"));
  EXPECT_THAT(refused("--nproc-per-node 0 echo started"), HasSubstr("--nproc-per-node is '0'"));
  EXPECT_THAT(refused("--nproc-per-node many echo started"),
              HasSubstr("--nproc-per-node is 'many'"));
  EXPECT_THAT(refused("--nnodes 0 echo started"), HasSubstr("--nnodes"));
  EXPECT_THAT(refused("--nnodes 2 echo started"), HasSubstr("--master-port"));
  EXPECT_THAT(refused("--nnodes 2 --node-rank 2 --master-port 1 echo started"),
              HasSubstr("--node-rank"));
  EXPECT_THAT(refused("--master-port 70000 echo started"), HasSubstr("--master-port"));
  EXPECT_THAT(refused("--no-such-option echo started"), HasSubstr("--no-such-option"));
  EXPECT_THAT(refused("--node-rank 1 echo started"),
              HasSubstr("--node-rank is 1; with --nnodes 1 it goes up to 0"));
  for (const char* value : {"-1", "0", "1000000000000", "1.5", "", "many"}) {
    EXPECT_THAT(refused("--status=" + std::string(value) + " echo started"), HasSubstr("--status"))
        << value;
  }
  EXPECT_THAT(refused("--grace -1 echo started"),
              HasSubstr("--grace: '-1' is given; it takes a whole number of at least 0"));
  EXPECT_THAT(refused("--node-rank abc echo started"),
              HasSubstr("'abc' is given; it takes a whole number"));
  EXPECT_THAT(refused("/no/such/program", 127), HasSubstr("cannot start '/no/such/program'"));
}

TEST(WeftRun, TooManyRanksErrorNamesTheLimit) {
  const auto outcome = run("ulimit -n 40; " + path_of("weft-run") + " --nproc-per-node 64 true");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("which needs some descriptors (ulimit -n)"));
  EXPECT_THAT(outcome.err, HasSubstr("Too many open files"));
}

TEST(WeftRun, SuggestsDotSlashForLocalPrograms) {
  const auto outcome = run("d=$(mktemp -d); cd $d; touch train; " + path_of("weft-run") +
                           " train; code=$?; cd /; rm -r $d; "
                           "exit $code");
  EXPECT_EQ(outcome.code, 127);
  EXPECT_THAT(outcome.err, HasSubstr("cannot start 'train': No such file or directory in PATH; the "
                                     "one in this folder is called "
                                     "./train\n"));
}

TEST(WeftRun, RefusesAWrongVariable) {
  const auto outcome = run("WEFT_LOG=loud " + path_of("weft-run") + " echo started");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("WEFT_LOG is 'loud'"));
}

TEST(WeftRun, RanksJoinAndReduce) {
  const auto outcome =
      run(path_of("weft-run") + " --no-prefix --nproc-per-node 3 " + path_of("join_and_reduce"));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre("rank 0 of 3: sum 6, from the left 2",
                                           "rank 1 of 3: sum 6, from the left 0",
                                           "rank 2 of 3: sum 6, from the left 1"));
}

TEST(WeftRun, ShowsTheErrorOfTheFirstRankToFail) {
  const auto outcome =
      run(path_of("weft-run") + " --nproc-per-node 2 " + path_of("join_and_reduce") + " 1");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: rank 1 failed first: exit code 1"));
  EXPECT_THAT(outcome.err, HasSubstr("\n  thrown on purpose\n"));
  EXPECT_THAT(outcome.err, HasSubstr("rank 1 left the group by an exception"))
      << "the error of rank 0";
  EXPECT_THAT(outcome.out, IsEmpty());
}

}  // namespace
}  // namespace weft::launch
