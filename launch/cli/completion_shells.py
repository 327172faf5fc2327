"""Scripts by which shells complete `launch`, with the places of the tables of words and values."""

BASH = """\
# completion of launch for bash 4.3 and later
declare -gA _launch_words=(
@WORDS@
)
declare -gA _launch_values=(
@VALUES@
)
_launch_runs() (  # a subshell, whose options are its own
  shopt -u failglob
  for path in "${SLUICE_DIRECTORY:-runs}"/*/; do
    name=${path%/} name=${name##*/}
    # compgen -W expands each word, so that a directory named $(command) would run it
    if [[ $name =~ ^[A-Za-z0-9_-]+$ ]]; then printf '%s\\n' "$name"; fi
  done
)
_launch() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} path= word key rest
  local -A seen=()
  if [[ $current == = ]]; then
    current=
  elif [[ $previous == = ]]; then  # bash takes --flag=value for three words
    previous=${COMP_WORDS[COMP_CWORD-2]}
  fi
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    key="${path:+$path }$word"
    if [[ $word == -* || -z "${_launch_words[$key]}" ]]; then break; fi
    path=$key
  done
  COMPREPLY=()
  if [[ $previous == --run ]]; then
    COMPREPLY=($(compgen -W "$(_launch_runs)" -- "$current"))
  elif [[ $previous == -* && -n "${_launch_values[$previous]}" ]]; then
    COMPREPLY=($(compgen -W "${_launch_values[$previous]}" -- "$current"))
  elif [[ $current == -* || $previous == "${path##* }" || $COMP_CWORD -eq 1 ]]; then
    for word in $(compgen -W "${_launch_words[${path:-launch}]}" -- "$current"); do
      rest=${word#"$current"}
      if [[ $rest == *.* ]]; then  # a section first, then what is in it
        word=$current${rest%%.*}.
        compopt -o nospace 2> /dev/null
      fi
      if [[ -z "${seen[$word]}" ]]; then seen[$word]=1; COMPREPLY+=("$word"); fi
    done
  fi
}
complete -o default -o bashdefault -F _launch launch"""
"""Takes tables as lines ['key']='words'."""

ZSH = r"""#compdef launch
# completion of launch for zsh 5.3 and later
_launch() {
  emulate -L zsh
  setopt extended_glob
  local -A known limited
  known=(
@WORDS@
  )
  limited=(
@VALUES@
  )
  local current=$PREFIX previous=${words[CURRENT-1]} place= word key rest
  local -a runs whole sections
  if [[ $current == --*=* ]]; then
    previous=${current%%=*}
    compset -P 1 '*='
    current=$PREFIX
  fi
  for word in ${words[2,CURRENT-1]}; do
    key="${place:+$place }$word"
    if [[ $word == -* || -z ${known[$key]} ]]; then break; fi
    place=$key
  done
  if [[ $previous == --run ]]; then
    runs=(${SLUICE_DIRECTORY:-runs}/*(N/:t))
    compadd -- ${(M)runs:#[A-Za-z0-9_-]##}
  elif [[ $previous == -* && -n ${limited[$previous]} ]]; then
    compadd -- ${=limited[$previous]}
  elif [[ $current == -* || $CURRENT -eq 2 || $previous == ${place##* } ]]; then
    for word in ${(M)${=known[${place:-launch}]}:#${(b)current}*}; do
      rest=${word#$current}
      if [[ $rest == *.* ]]; then  # a section first, then what is in it
        sections+=($current${rest%%.*}.)
      else
        whole+=($word)
      fi
    done
    compadd -S '' -- ${(u)sections}
    compadd -- $whole
  else
    _files
  fi
}
if [[ $funcstack[1] == _launch ]]; then  # zsh has loaded this file to complete something
  _launch "$@"
else
  compdef _launch launch
fi"""
"""Takes tables as lines 'key' 'words'."""

FISH = r"""# completion of launch for fish 3.4 and later
function __launch_words
    switch "$argv"
@WORDS@
    end
end
function __launch_values
    switch "$argv"
@VALUES@
    end
end
function __launch_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l previous $before[-1]
    set -l head ''
    set -l place
    if string match -q -- '--*=*' $current
        set previous (string split -m 1 = -- $current)[1]
        set head $previous=
    end
    for word in $before[2..]
        set -l key (string trim "$place $word")
        if string match -q -- '-*' $word; or test -z "$(__launch_words $key)"
            break
        end
        set place $key
    end
    set -l values (__launch_values $previous | string split ' ')
    if test "$previous" = --run
        set -l root runs
        set -q SLUICE_DIRECTORY; and set root $SLUICE_DIRECTORY
        for run in $root/*/
            set -l name (string replace -r '^.*/([^/]+)/$' '$1' -- $run)
            string match -r '^[A-Za-z0-9_-]+$' -- $name | string replace -r '^' "$head"
        end
    else if test -n "$values"
        printf '%s\n' $head$values
    else if string match -q -- '-*' $current; or test (count $before) -eq 1
        or test "$previous" = "$(string split ' ' -- $place)[-1]"
        set -q place[1]; or set place launch
        for word in (__launch_words $place | string split ' ')
            set -l length (string length -- "$current")
            if test "$(string sub -l $length -- $word)" = "$current"
                # a section first, then what is in it
                set -l rest (string split -m 1 . -- (string sub -s (math $length + 1) -- $word))
                test (count $rest) -gt 1; and echo -- $current$rest[1].; or echo -- $word
            end
        end | sort -u
    else
        __fish_complete_path $current
    end
end
complete -c launch -f -a '(__launch_complete)'"""
"""Takes tables as cases of a switch."""
