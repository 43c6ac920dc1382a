# SPDX-License-Identifier: Apache-2.0
# Runs in the guest (see guest.py). First one device that reaches itself, with all claims; then two
# devices joined by a cable that loses one packet in 400 each way, then also delays packets, and in
# the end loses all of them.
export TSAN_OPTIONS=die_after_fork=0  # for builds with the thread sanitizer, since the tests fork
export WEFT_TEST_SHORT_TIMEOUT_MS=10000  # joining alone takes a second here
set -f  # patterns in this script name tests, not files
failed=''
fail() { # fail WHAT: prints it now, and once more at the end
  echo "== $1"
  failed="$failed
$1"
}
check() { # check TITLE COMMAND…
  title=$1; shift
  echo "== $title"
  "$@" || fail "$title: failed with $?"
}
tests() { # tests TITLE PROGRAM FILTER: runs the tests that match; each pattern of the filter must match one
  for pattern in $(echo "${3%:-*}" | tr : ' '); do
    "$2" --gtest_list_tests "--gtest_filter=$pattern" | grep -q '^  ' || fail "$1: no test is called $pattern"
  done
  check "$1" "$2" --gtest_brief=1 "--gtest_filter=$3"
}
# apart TITLE FILTER: runs the claims of processes by themselves. A process that has run other
# claims has threads that have not ended yet, and would fork in the middle of their work. A child has
# pages that are registered for a device as they were in the middle of fork(), and all others as they
# were at its end: if such pages belong to the heap, a block that a thread freed meanwhile is half
# free in the child.
apart() {
  tests "$1, processes" /mnt/bin/guest_test "$2:-*ConnectionClaims.*:*PutClaims.*:*/VerbsThreads2"
  tests "$1, threads" /mnt/bin/guest_test "$2:-*ProcessClaims.*"
}

/bin/ip link add d0 type dummy
/bin/ip addr add 10.7.0.1/24 dev d0
/bin/ip link set d0 mtu 4200 up # room for an RDMA packet of 4096 bytes
/bin/rdma link add rxe0 type rxe netdev d0
# The everyday run has every claim once. With WEFT_ALL_SETTINGS (./dev test --all) claims of ranks
# also run in processes, the long run has more messages, GPU memory also goes through pinned memory,
# and the cable delays packets. Every number of ranks would take minutes more.
threads='*Claims.*/verbs:*/VerbsThreads2:Rdma*:-*ProcessClaims.*'
processes='*ProcessClaims.*/verbs:*ConnectionFaults.*/verbs'
ways='peermem/verbsDirect'
if [ -n "$WEFT_ALL_SETTINGS" ]; then
  processes="$processes:*/VerbsProcesses3"
  ways="$ways auto/verbs"
fi
check 'weft-info' /mnt/bin/guest_info
tests 'one device, processes' /mnt/bin/guest_test "$processes"
tests 'one device, threads' /mnt/bin/guest_test "$threads"
[ -n "$WEFT_ALL_SETTINGS" ] && messages=5000 || messages=500
export WEFT_SOAK_MESSAGES=$messages
tests 'one device, a longer run' /mnt/bin/guest_test '*ConnectionSoak.*/verbs'
if [ -x /mnt/bin/guest_gpu_test ]; then
  # Software RDMA accepts a fake GPU's memory by address, as with nvidia_peermem; it does not
  # support dma-bufs. Each shard is a process of its own: a fake GPU keeps its addresses, and under
  # a sanitizer the guest has too little memory for those of all tests.
  for way in $ways; do
    export WEFT_GPUDIRECT=${way%/*} GTEST_TOTAL_SHARDS=14
    GTEST_SHARD_INDEX=0
    while [ $GTEST_SHARD_INDEX -lt $GTEST_TOTAL_SHARDS ]; do
      export GTEST_SHARD_INDEX
      tests "memory of a GPU, $way, $GTEST_SHARD_INDEX" /mnt/bin/guest_gpu_test "*DeviceClaims.*/${way#*/}"
      GTEST_SHARD_INDEX=$((GTEST_SHARD_INDEX + 1))
    done
  done
  unset WEFT_GPUDIRECT GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX
fi

/bin/rdma link delete rxe0
/bin/ip link add va type veth peer name vb
/bin/ip link set va mtu 4200 up
/bin/ip link set vb mtu 4200 up
/bin/ip addr add 10.9.0.1/24 dev va
/bin/ip addr add 10.9.0.2/24 dev vb
for interface in all va vb; do
  settings=/proc/sys/net/ipv4/conf/$interface
  echo 1 > $settings/accept_local; echo 0 > $settings/rp_filter; echo 1 > $settings/arp_ignore
done
# Both ends are on this machine, so the kernel must be told that the route between them is the
# cable.
/bin/ip rule add pref 10 iif lo to 10.9.0.2 table 102
/bin/ip rule add pref 11 iif lo to 10.9.0.1 table 101
/bin/ip rule add pref 100 table local
/bin/ip rule del pref 0
/bin/ip route add 10.9.0.2 dev va src 10.9.0.1 table 102
/bin/ip route add 10.9.0.1 dev vb src 10.9.0.2 table 101
/bin/rdma link add rxea type rxe netdev va
/bin/rdma link add rxeb type rxe netdev vb
# Each end drops every 400th packet that arrives. A counter chooses it: "netem loss" chooses at
# random, so the time of a transfer would have no limit. rxe has at most 129 packets on their way,
# and sends all of them again after a loss. They arrive before the next loss, as 2 * 129 < 400, so a
# loss costs at most one timeout, and 271 new packets arrive for each. (The retry count never runs
# out: rxe retries without end if it is 7, as in transport/verbs/queue_pair.cc.)
for interface in va vb; do
  /bin/tc qdisc add dev $interface ingress
  /bin/tc filter add dev $interface ingress matchall action pass random determ drop 400
done
# Lost packets are sent again after 4.096 us * 2^16 = 0.27 s, not after the second that suits a
# cluster. The longest test moves 107 MB, 26,200 packets of 4096 bytes: at most 97 losses and 26 s
# of timeouts. A wait may take longer if the host is busy.
export WEFT_IB_TIMEOUT=16 WEFT_TEST_INTERFACE=10.9.0.2 WEFT_TEST_PATIENCE_S=240
some='*.CarriesAMessageEachWay/verbs:*.PayloadsLand*/verbs:*.MessagesWrapAround*/verbs:*.CarriesALotBothWaysAtOnce/verbs'
some="$some:*.SentMessagesArrive*/verbs:*.EchoesMessagesOfAllSizes/verbs:*.KilledPeerEndsAnIdleConnection/verbs"
apart 'two devices, one packet in 400 lost' "$some:*.AllReduceSupportsWhatItAnnounces/VerbsThreads2"
for interface in va vb; do
  /bin/tc -s filter show dev $interface ingress | grep -o 'dropped [0-9]*' | sed "s/^/$interface: /"
  /bin/tc -s filter show dev $interface ingress | grep -q 'dropped [1-9]' || fail "$interface lost nothing"
done
# Packets are also delayed, in their order: a reliable connection treats one that overtakes as lost.
# Tests that move tens of megabytes would take a minute this way.
if [ -n "$WEFT_ALL_SETTINGS" ]; then
  for interface in va vb; do
    /bin/tc qdisc add dev $interface root netem delay 1ms limit 10000
  done
  some='*.CarriesAMessageEachWay/verbs:*.PayloadsLand*/verbs:*.SentMessagesArrive*/verbs:*.KilledPeerEndsAnIdleConnection/verbs'
  apart 'two devices, packets late and lost' "$some:*PutClaims.*/verbs:*.AllReduceSupportsWhatItAnnounces/VerbsThreads2"
fi
tests 'two devices, a cut cable' /mnt/bin/guest_test 'VerbsCable.*'
# Effects of software RDMA on the kernel: for example a registration that was still in use when the
# device went away.
dmesg | grep -A 20 'WARNING:\|BUG:\|Oops' && fail 'the kernel complains'
[ -z "$failed" ] || { echo "== failed in the guest:$failed"; exit 1; }
