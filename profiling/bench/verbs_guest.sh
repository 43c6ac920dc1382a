# SPDX-License-Identifier: Apache-2.0
# Runs the bench verbs in the guest of tests/guest, with one device that reaches itself.
/bin/ip link add d0 type dummy
/bin/ip addr add 10.7.0.1/24 dev d0
/bin/ip link set d0 mtu 4200 up
/bin/rdma link add rxe0 type rxe netdev d0
export WEFT_IN_GUEST=1
eval /mnt/bin/verbs_bench "$(cat /mnt/arguments)"
