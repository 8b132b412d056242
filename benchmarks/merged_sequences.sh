# Bits of merged networks on docs/sequences.md: `sh benchmarks/merged_sequences.sh` in a folder for the networks that it saves.
quality="python $(dirname "$0")/sequence_quality.py"
anbn="$quality anbn --units 16 --restarts 16 --heat 120 --passes 1200"
$anbn --ensemble 4 --folds 2
$anbn --ensemble 3 # one text to learn, one to stop on
for s in 1000 1002 1004 1006 1008 1010 1012 1014; do
  music="$quality music --units 16 --passes 1500 --patience 200"
  $music --seed $s --save music$s.st
  $music --seed $((s + 1)) --exchange --save music-exchange$((s + 1)).st
  alphabet="$quality alphabet --units 16 --passes 400 --patience 80 --prior-writing 0.02 --prior-transition 1"
  $alphabet --seed $s --save alphabet$s.st
  $alphabet --seed $((s + 1)) --exchange --save alphabet-exchange$((s + 1)).st
done
for t in music alphabet; do
  $quality $t --members ${t}1*.st --exchanged $t-exchange*.st
  $quality $t --members ${t}1*.st # those that learned the first text alone
done
