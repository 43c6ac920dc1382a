// SPDX-License-Identifier: Apache-2.0
// Tests weft-run on several nodes that meet at a rendezvous (here, processes of one machine), and
// --max-restarts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/engine/launch/process.h>
#include <weft/tests/engine/launch/command.h>

namespace weft::launch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::UnorderedElementsAre;

// Returns a weft-run command that runs `script` on each rank.
std::string node(const std::string& options, const std::string& script) {
  return path_of("weft-run") + " --grace 1 --no-prefix " + options + " sh -c '" + script + "'";
}

// Returns options for nodes that meet, and that notice changes soon.
std::string meeting(const std::string& nodes) {
  return "--nnodes " + nodes + " --rdzv-endpoint 127.0.0.1:" + std::to_string(free_port()) +
         " --rdzv-conf keep_alive_interval=0.5,last_call_timeout=0,join_timeout=40 ";
}

TEST(MaxRestarts, RestartsAllRanks) {
  const auto outcome = run(node(
      "--nproc-per-node 2 --max-restarts 3",
      "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS: $RANK; "
      "test $TORCHELASTIC_RESTART_COUNT = 2 && exit 0; test $RANK = 1 || exec sleep 1000; exit 3"));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre("0 of 3: 0", "0 of 3: 1", "1 of 3: 0", "1 of 3: 1",
                                           "2 of 3: 0", "2 of 3: 1"));
  EXPECT_THAT(
      outcome.err,
      HasSubstr("rank 1 failed first: exit code 3; the ranks start again, 2 of 3 restarts used"));
}

TEST(MaxRestarts, LastFailureFailsTheJob) {
  const auto outcome = run(node("--nproc-per-node 2 --max-restarts 1",
                                "test $RANK = 1 || exec sleep 1000; echo why >&2; exit 4"));
  EXPECT_EQ(outcome.code, 4);
  EXPECT_THAT(outcome.err, HasSubstr("1 of 1 restarts used"));
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: no restart is left of 1"));
}

TEST(MaxRestarts, EachRoundHasItsOwnPort) {
  const auto outcome =
      run(node("--max-restarts 1", "echo $MASTER_PORT; test $TORCHELASTIC_RESTART_COUNT = 1") +
          " | sort -u | wc -l");
  EXPECT_THAT(outcome.lines(), ElementsAre("2")) << outcome.err;
}

TEST(MaxRestarts, EachRoundHasItsOwnDumpFolder) {
  const std::string script =
      "echo to $WEFT_DUMP_DIR; test $TORCHELASTIC_RESTART_COUNT = $TORCHELASTIC_MAX_RESTARTS";
  const auto lines_of = [&](const std::string& environment, const std::string& options) {
    return run("env " + environment + " " + node(options, script)).lines();
  };
  EXPECT_THAT(lines_of("WEFT_DUMP_DIR=dumps", "--max-restarts 1"),
              ElementsAre("to dumps/attempt_0", "to dumps/attempt_1"));
  EXPECT_THAT(lines_of("WEFT_DUMP_DIR=dumps", meeting("1")), ElementsAre("to dumps/attempt_0"));
  EXPECT_THAT(lines_of("WEFT_DUMP_DIR=dumps", ""), ElementsAre("to dumps")) << "there is one round";
  EXPECT_THAT(lines_of("-u WEFT_DUMP_DIR", "--max-restarts 1"), ElementsAre("to", "to"));
}

TEST(MaxRestarts, SignalIsNoFailure) {
  const auto outcome =
      run("d=$(mktemp -d); mkfifo $d/ready; export d; " +
          node("--max-restarts 5", "echo > $d/ready; exec sleep 1000") +
          " & read line < $d/ready; kill -TERM $!; wait $!; code=$?; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 128 + 15) << outcome.err;
  EXPECT_THAT(outcome.err, Not(HasSubstr("start again")));
}

TEST(Logs, KeepTheRanksOutput) {
  const auto outcome = run(
      "d=$(mktemp -d); " +
      node("--nproc-per-node 2 --max-restarts 1 --rdzv-id job --log-dir $d",
           "echo out $RANK; echo err $RANK >&2; test $TORCHELASTIC_RESTART_COUNT = 1 || exit 3") +
      " > $d/shown; code=$?; cd $d; sort shown; for f in $(find job_* -type f | sort); do "
      "echo $f: $(cat $f) | sed s/job_[0-9a-f]*/job/; done; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(),
              ElementsAre("job/attempt_0/0/stderr.log: err 0", "job/attempt_0/0/stdout.log: out 0",
                          "job/attempt_0/1/stderr.log: err 1", "job/attempt_0/1/stdout.log: out 1",
                          "job/attempt_1/0/stderr.log: err 0", "job/attempt_1/0/stdout.log: out 0",
                          "job/attempt_1/1/stderr.log: err 1", "job/attempt_1/1/stdout.log: out 1",
                          "out 0", "out 0", "out 1", "out 1"));
  EXPECT_THAT(outcome.err, HasSubstr("/attempt_0/"));
}

TEST(Logs, TakeRedirectedOutput) {
  const auto outcome =
      run("d=$(mktemp -d); " +
          node("--nproc-per-node 3 --log-dir $d -r 1:2,0:1", "echo out $RANK; echo err $RANK >&2") +
          "; code=$?; cd $d; for f in $(find . -type f | sort); do "
          "echo $f: $(cat $f) | sed s/none_[0-9a-f]*/run/; done; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(),
              UnorderedElementsAre("./run/attempt_0/0/stdout.log: out 0",
                                   "./run/attempt_0/1/stderr.log: err 1", "out 1", "out 2"));
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("err 0"), Not(HasSubstr("err 1")), HasSubstr("err 2")));
}

TEST(Logs, UnwritableFolderIsRefused) {
  const auto outcome = run(node("--log-dir /dev/null/logs", "echo started"));
  EXPECT_NE(outcome.code, 0);
  EXPECT_THAT(outcome.err, HasSubstr("--log-dir: /dev/null/logs/"));
  EXPECT_THAT(run(path_of("weft-run") + " --tee 3 true").err,
              HasSubstr("need a folder for the logs: --log-dir"));
  EXPECT_THAT(run(path_of("weft-run") + " --log-dir /tmp --tee 4 true").err,
              HasSubstr("--tee is '4'"));
  for (const std::string option : {"--tee", "--redirects"}) {
    const auto none = run(path_of("weft-run") + " --nproc-per-node 2 --log-dir /tmp " + option +
                          " 0:3,2:1 echo started");
    EXPECT_EQ(none.code, 2);
    EXPECT_EQ(none.out, "");
    EXPECT_THAT(none.err,
                HasSubstr(option + " names local rank 2; with --nproc-per-node 2 they go up to 1"));
  }
}

TEST(Logs, StayInTheirFolderForAnyJobName) {
  const auto outcome =
      run("d=$(mktemp -d); " + node("--rdzv-id ../a/b --log-dir $d/logs", "echo out") +
          "; code=$?; cd $d; find . -name stdout.log | sed s/b_[0-9a-f]*/b/; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre("./logs/.._a_b/attempt_0/0/stdout.log", "out"));
}

// The endpoint's name contains a space, so no name server is asked for it.
TEST(Elastic, SignalEndsTheSearchForRendezvous) {
  const auto outcome =
      run("d=$(mktemp -d); " + path_of("weft-run") +
          " --nnodes 2 --rdzv-endpoint 'two words:29400' true 2> $d/err & weft=$!; until grep -q "
          "'looking again' $d/err; do sleep 0.05; done; kill -TERM $weft; wait $weft; code=$?; "
          "cat $d/err >&2; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 128 + 15) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: ended by signal 15 (Terminated)\n"));
}

// The other program accepts connections and sends nothing.
TEST(Elastic, OtherProgramAtEndpointIsAnError) {
  const std::string port = std::to_string(free_port());
  const std::string script =
      "import signal, socket; server = socket.create_server((\"127.0.0.1\", " + port +
      ")); print(\"there\", flush=True); signal.pause()";
  const auto outcome =
      run("d=$(mktemp -d); mkfifo $d/there; " + path_of("python") + " -c '" + script +
          "' > $d/there & other=$!; " + "read line < $d/there; " + path_of("weft-run") +
          " --nnodes 2 --rdzv-endpoint 127.0.0.1:" + port +
          " --rdzv-conf join_timeout=1 true; code=$?; kill $other; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: no rendezvous at 127.0.0.1:" + port +
                                     ": the listener at 127.0.0.1:" + port +
                                     " does not answer like the store of a job"));
}

// The nodes have 2 ranks and 1 rank, and are numbered in the order in which they arrive.
TEST(Elastic, NodesAgreeOnTheirRanks) {
  const std::string options = meeting("2");
  const std::string script =
      "echo $GROUP_RANK/$GROUP_WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $WORLD_SIZE $MASTER_ADDR; "
      "test $RANK -ge 0 -a $RANK -lt 3";
  const auto outcome = run(node(options + "--nproc-per-node 2", script) + " & " +
                           node(options, script) + " && wait $!");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(
      outcome.lines(),
      testing::AnyOf(
          ElementsAre("0/2 0/2 3 127.0.0.1", "0/2 1/2 3 127.0.0.1", "1/2 0/1 3 127.0.0.1"),
          ElementsAre("0/2 0/1 3 127.0.0.1", "1/2 0/2 3 127.0.0.1", "1/2 1/2 3 127.0.0.1")));
}

TEST(Elastic, NodesMayRequestARank) {
  const std::string options = meeting("2");
  const auto outcome = run(node(options + "--node-rank 1", "echo one $RANK") + " & " +
                           node(options + "--node-rank 0", "echo zero $RANK") + " && wait $!");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre("one 1", "zero 0"));
}

TEST(Elastic, RanksOfSeveralNodesJoinAGroup) {
  const std::string command =
      path_of("weft-run") + " " + meeting("2") + "--nproc-per-node 2 " + path_of("join_and_reduce");
  const auto outcome = run(command + " & " + command + " && wait $!");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

TEST(Elastic, FailureReachesTheOtherNodes) {
  const std::string options = meeting("2");
  const auto outcome = run("{ " + node(options, "exec sleep 1000") + "; echo other $?; } & " +
                           node(options, "sleep 0.2; exit 7") + "; echo own $?; wait");
  EXPECT_THAT(outcome.lines(), ElementsAre("other 7", "own 7"));
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: the job has failed: rank "));
  EXPECT_THAT(outcome.err, HasSubstr("failed first: exit code 7 on the node at 127.0.0.1"));
}

TEST(Elastic, FailureRestartsAllNodes) {
  const std::string options = meeting("2") + "--max-restarts 1 ";
  const std::string rest = "echo again $GROUP_RANK; exit 0";
  const auto outcome =
      run("{ " + node(options, "test $TORCHELASTIC_RESTART_COUNT = 1 || exec sleep 1000; " + rest) +
          "; echo code $?; } & " +
          node(options, "test $TORCHELASTIC_RESTART_COUNT = 1 || exit 7; " + rest) +
          "; echo code $?; wait");
  EXPECT_THAT(outcome.lines(), ElementsAre("again 0", "again 1", "code 0", "code 0"))
      << outcome.err;
}

// One of two nodes is killed, then another one joins. The test kills the process that watches the
// ranks: if it killed weft-run, the node could still tell the others that it leaves.
TEST(Elastic, NodesLeaveAndJoin) {
  const std::string options = meeting("1:2");
  const std::string wait_for_others =
      "echo $PPID > $d/parent$RANK; echo $WORLD_SIZE $RANK >> $d/all; test -e $d/end || exec sleep "
      "1000";
  const auto outcome =
      run("d=$(mktemp -d); export d; until_there() { for i in $(seq 300); do grep -qx \"$1\" "
          "$d/all 2> /dev/null && return; "
          "sleep 0.1; done; echo \"no $1\"; }; " +
          node(options, wait_for_others) + " & first=$!; until_there \"1 0\"; " +
          node(options, wait_for_others) +
          " & until_there \"2 0\"; until_there \"2 1\"; : > $d/all; kill -KILL $(cat $d/parent1); "
          "until_there \"1 0\"; " +
          "touch $d/end; " + node(options, wait_for_others) +
          "; echo third $?; wait $first; echo first $?; rm -r $d");
  EXPECT_THAT(outcome.lines(), ElementsAre("first 0", "third 0"));
  EXPECT_THAT(
      outcome.err,
      AllOf(
          HasSubstr("weft-run: the node at 127.0.0.1 is lost; the ranks start again: 1 on 1 node"),
          HasSubstr("weft-run: a node has come; the ranks start again: 2 on 2 nodes")));
}

TEST(Elastic, NodeOfKilledWeftRunLeavesAtOnce) {
  const std::string options = meeting("1:2");
  const std::string script =
      "echo $WORLD_SIZE $RANK >> $d/all; test $WORLD_SIZE = 1 && test -e $d/killed && exit 0; exec "
      "sleep 1000";
  const auto outcome =
      run("d=$(mktemp -d); export d; until_there() { for i in $(seq 300); do grep -qx \"$1\" "
          "$d/all 2> /dev/null && return; "
          "sleep 0.1; done; echo \"no $1\"; }; " +
          node(options, script) + " & first=$!; until_there \"1 0\"; " + node(options, script) +
          " & second=$!; until_there \"2 1\"; touch $d/killed; kill -KILL $second; wait $first; "
          "echo first $?; rm -r $d");
  EXPECT_THAT(outcome.lines(), ElementsAre("first 0")) << outcome.err;
  EXPECT_THAT(
      outcome.err,
      HasSubstr("weft-run: the node at 127.0.0.1 has left; the ranks start again: 1 on 1 node"));
}

TEST(Elastic, OneMachineNeedsNoPort) {
  const auto outcome =
      run(node("--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0", "echo $WORLD_SIZE"));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre("1"));
}

TEST(Elastic, TooFewNodesAreAnError) {
  const auto outcome =
      run(node("--nnodes 2 --rdzv-endpoint 127.0.0.1:" + std::to_string(free_port()) +
                   " --rdzv-conf join_timeout=0.2",
               "exit 0"));
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: no rendezvous within 200 ms"));
  EXPECT_THAT(outcome.err, HasSubstr("1 of 2 nodes have come"));
}

TEST(Elastic, OtherNumberOfNodesIsRefused) {
  const std::string endpoint = " --rdzv-endpoint 127.0.0.1:" + std::to_string(free_port()) + " ";
  const auto outcome =
      run("d=$(mktemp -d); " + node("--nnodes 2" + endpoint, "exit 0") +
          " 2> $d/log & until grep -q \"have come\" $d/log; do sleep 0.05; done; " +
          node("--nnodes 3" + endpoint, "exit 0") + "; echo code $?; " +
          node("--nnodes 2" + endpoint, "exit 0") + "; echo code $?; wait; rm -r $d");
  EXPECT_THAT(outcome.out, HasSubstr("code 2\ncode 0\n")) << outcome.err;
  EXPECT_THAT(
      outcome.err,
      HasSubstr(
          "weft-run: this node was started with --nnodes 3, and the job at this rendezvous with "
          "--nnodes 2;"));
}

TEST(Elastic, LostRendezvousHostEndsTheOthers) {
  const std::string options = meeting("2");
  const auto outcome =
      run("d=$(mktemp -d); export d; mkfifo $d/ready; " + node(options, "exec sleep 1000") +
          " 2> $d/log & host=$!; until grep -q \"have come\" $d/log; do sleep 0.05; done; { " +
          node(options, "echo > $d/ready; exec sleep 1000") +
          "; echo code $?; } & read line < $d/ready; kill -KILL $host; wait; rm -r $d");
  EXPECT_THAT(outcome.lines(), ElementsAre("code 1"));
  EXPECT_THAT(
      outcome.err,
      HasSubstr("the rendezvous at 127.0.0.1:"));  // noticed while it watches its ranks, or asks
  EXPECT_THAT(outcome.err, HasSubstr("the weft-run there must live as long as the job"));
}

// The host's connection stays open, and nothing answers: as after a machine's loss.
TEST(Elastic, SignalEndsANodeWhoseRendezvousHostIsStopped) {
  const std::string options = meeting("2");
  const auto outcome =
      run("d=$(mktemp -d); export d; mkfifo $d/ready; " + path_of("weft-agent") + " " + options +
          " sleep 1000 2> $d/log & host=$!; until grep -q \"have come\" $d/log; do sleep 0.05; "
          "done; " +
          node(options, "echo > $d/ready; exec sleep 1000") +
          " & node=$!; read line < $d/ready; kill -STOP $host; sleep 1; kill -TERM $node; wait "
          "$node; echo code $?; kill -KILL $host; rm -r $d");
  EXPECT_THAT(outcome.lines(), ElementsAre("code 143")) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("weft-run: ended by signal 15 (Terminated)"));
}

// The command line is right and may be started again unchanged, so the exit code is 1 and not 2.
TEST(Elastic, MissingHostIsNoUsageError) {
  const auto outcome = run(path_of("weft-run") +
                           " --nnodes 2 --rdzv-endpoint 127.0.0.1:" + std::to_string(free_port()) +
                           " --rdzv-conf is_host=0,join_timeout=0.2 true");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("no rendezvous at 127.0.0.1:"));
}

TEST(Elastic, RefusesConflictingOptions) {
  const auto refusal = [](const std::string& options) {
    const auto outcome = run(path_of("weft-run") + " " + options + " true");
    EXPECT_EQ(outcome.code, 2) << options;
    return outcome.err;
  };
  EXPECT_THAT(refusal("--nnodes 2:1"), HasSubstr("--nnodes is '2:1'"));
  EXPECT_THAT(refusal("--nnodes 1:2"), HasSubstr("give all nodes the same --rdzv-endpoint"));
  EXPECT_THAT(refusal("--nnodes 2 --max-restarts 1 --master-port 29500"),
              HasSubstr("--max-restarts on several machines"));
  EXPECT_THAT(refusal("--nnodes 2 --rdzv-endpoint a --master-port 1"),
              HasSubstr("leave out --master-addr"));
  EXPECT_THAT(refusal("--nnodes 2 --rdzv-endpoint a --node-rank 2"), HasSubstr("it goes up to 1"));
  EXPECT_THAT(refusal("--rdzv-endpoint a:b"), HasSubstr("it takes host:port"));
  EXPECT_THAT(refusal("--rdzv-endpoint [::1"), HasSubstr("it takes host:port"));
  EXPECT_THAT(refusal("--nnodes 2 --rdzv-endpoint a:0"), HasSubstr("--rdzv-endpoint has port 0"));
  EXPECT_THAT(refusal("--rdzv-conf join_timeout=soon"),
              HasSubstr("--rdzv-conf has 'join_timeout=soon'"));
  EXPECT_THAT(refusal("--rdzv-backend etcd"), HasSubstr("unknown --rdzv-backend etcd; use c10d"));
  EXPECT_THAT(
      refusal("--rdzv-backend static --rdzv-endpoint a:1"),
      HasSubstr("--rdzv-backend static goes with --node-rank, --master-addr and --master-port"));
  EXPECT_THAT(refusal("--standalone --nnodes 2"), HasSubstr("--standalone is for one machine"));
}

}  // namespace
}  // namespace weft::launch
