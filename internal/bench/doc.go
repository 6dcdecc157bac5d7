// Command bench measures what the sidecar costs, beside a plain httputil.ReverseProxy and beside no proxy at all.
//
// One run has everything in it: a simulated upstream, each proxy and the load generator are processes of their own, so
// that CPU time and memory belong to one of them each. The upstream and the load generator write and read prepared bytes
// on raw sockets, so that they cost little beside what is measured. Within a repetition every contender gets the same work one
// after another, in an order that turns from repetition to repetition; what is judged is the median over the
// repetitions of the ratio within one.
//
// With --together a job goes to all contenders at once. What differs from one process or one moment to the next is then
// much less in the way of a difference between proxies; what a proxy costs alone is not to be seen so.
//
// With --peers other proxies and the sidecar's other sources are in it too. A contender is a chain of programs, each with
// its workers: CPU time and memory are the sums. Samples in which something else used the machine are measured again,
// and left out where there are quieter ones.
//
// The program starts itself again for the parts: "upstream", "plain", "load" and "profiled" are hidden commands.
// docs/performance.md tells how to read the table.
package main
